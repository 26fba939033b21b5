"""Fine-tune a LoRA adapter in a swarm: `transformers.Trainer`, `peft`, and prompts that the loss leaves out.

The first peer: `python examples/sft_lora.py ~/first`. It prints an invite. Others: `python examples/sft_lora.py ~/second INVITE`.
Three lines are for the swarm; they are marked. The base model is a small one with random weights, and the task is to sort six digits: the
script needs no download. It needs `pip install transformers accelerate peft`.
"""

import sys
import zlib

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import gossamer.transformers  # swarm

STEPS = 300
ANSWER, VOCABULARY = 10, 16  # the token between prompt and answer; the digits are tokens 0 to 9


def conversations(number, seed):
    prompts = torch.randint(0, 10, (number, 6), generator=torch.Generator().manual_seed(seed))
    tokens = torch.cat([prompts, torch.full((number, 1), ANSWER), prompts.sort(dim=1).values], dim=1)
    labels = tokens.clone()
    labels[:, :7] = -100  # the prompt is masked: the model learns to answer, not to ask
    return {"input_ids": tokens, "labels": labels}


def adapted_model():
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    adapter = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    return get_peft_model(LlamaForCausalLM(config), adapter)


def main(home, invite=None):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = adapted_model()
    data = conversations(2048, seed=zlib.crc32(home.encode()))
    held_out = conversations(256, seed=1)

    def evaluate():
        return model(**{name: tensor.to(model.device) for name, tensor in held_out.items()}).loss

    run = gossamer.Run("sft-lora", STEPS)
    callback = gossamer.transformers.SwarmCallback(invite or run, evaluate=evaluate, home=home, settings={"wait_for_peers": 1})  # swarm
    arguments = TrainingArguments(
        output_dir=f"{home}.trainer",
        max_steps=STEPS,
        per_device_train_batch_size=32,
        learning_rate=1e-2,
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{name: tensor[row] for name, tensor in data.items()} for row in range(2048)]
    Trainer(
        model=model,
        args=arguments,
        train_dataset=rows,
        callbacks=[callback],  # swarm
    ).train()

    adapter = torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters() if parameter.requires_grad])
    with torch.no_grad():
        model.eval()
        print(f"held-out loss {evaluate():.3f}, {len(adapter)} values, weights {zlib.crc32(adapter.numpy().tobytes()):08x}")


if __name__ == "__main__":
    main(*sys.argv[1:])
