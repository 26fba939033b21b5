"""When the trainer saves, and how a replica and a checkpoint turn into each other. The files themselves: peer/model/checkpoint.py."""

from __future__ import annotations

from collections.abc import Callable

from peer.machine.config import PeerConfig
from peer.machine.events import CheckpointFailed, CheckpointRejected, CheckpointSaved, Event
from peer.machine.home import Home
from peer.model.checkpoint import CheckpointContents, Loaded, save
from peer.trainer.replica import Replica
from protocol.errors import BadSettings, GossamerError


class Saver:
    """Save a replica every so many steps or seconds, whichever comes first."""

    def __init__(self, home: Home, config: PeerConfig, emit: Callable[[Event], None], now_s: Callable[[], float]) -> None:
        self.has_checkpoint = False  # of this run, written or restored by us
        self._trouble = ""  # why the last one could not be saved
        self._passed_over = ""  # what was damaged when this process began
        self._home = home
        self._config = config
        self._emit = emit
        self._now_s = now_s
        self._saved_s = self._now_s()
        self._saved_step = 0

    @property
    def trouble(self) -> str:
        """Return what is, or was at the start, wrong with the checkpoints, in words; empty if nothing."""
        return self._trouble or self._passed_over

    def is_due(self, replica: Replica) -> bool:
        """Tell whether enough steps or seconds have passed since the last checkpoint."""
        steps, seconds = replica.own_steps - self._saved_step, self._now_s() - self._saved_s
        enough_steps = self._config.checkpoint_interval_steps
        return seconds >= self._config.checkpoint_interval_s or (enough_steps > 0 and steps >= enough_steps)

    def save(self, replica: Replica) -> None:
        """Save now.

        A disk that refuses costs this checkpoint, not the training: the earlier ones are untouched, and an event says so.
        """
        started_s = self._now_s()
        contents = CheckpointContents(replica.manifest.run_id, replica.own_steps, replica.tensors(), replica.state())
        try:
            path = save(self._home.checkpoints, contents)
        except GossamerError as error:
            self._trouble = str(error)
            self._emit(CheckpointFailed(replica.own_steps, self._trouble))
        else:
            self.has_checkpoint, self._trouble = True, ""
            num_bytes = sum(file.stat().st_size for file in path.iterdir())
            self._emit(CheckpointSaved(replica.own_steps, str(path), num_bytes, self._now_s() - started_s))
        self._saved_s, self._saved_step = self._now_s(), replica.own_steps

    def restore(self, replica: Replica, loaded: Loaded) -> None:
        """Take over a checkpoint. Raises BadSettings when it is of another model than the manifest's."""
        for path, reason in loaded.rejected:
            self._emit(CheckpointRejected(str(path), reason))
        try:
            replica.restore(loaded.contents.tensors, loaded.contents.state)
        except (KeyError, ValueError, RuntimeError) as error:
            reason = f"the checkpoint {loaded.path} does not fit the model: {error}"
            raise BadSettings(reason, hint="move it away, or use another --home") from error
        self._saved_step = replica.own_steps
        self.has_checkpoint = True
        if loaded.rejected:
            damaged = ", ".join(f"{path.name} ({reason})" for path, reason in loaded.rejected)
            self._passed_over = f"went back to checkpoint {loaded.path.name}: damaged are {damaged}"
