"""The generated code matches peer.proto, for any release of protoc."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

from gossamer.protocol.streams.transport import Purpose
from gossamer.protocol.wire import peer_pb2

PROTO = "protocol/wire/peer.proto"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptorProto:
    out = tmp_path_factory.mktemp("wire") / "descriptors"
    assert protoc.main(["protoc", f"--proto_path={ROOT}", f"--descriptor_set_out={out}", PROTO]) == 0
    return FileDescriptorSet.FromString(out.read_bytes()).file[0]


def without_json_names(file: FileDescriptorProto) -> FileDescriptorProto:
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")
    return file


def test_the_generated_messages_are_not_stale(written: FileDescriptorProto) -> None:
    generated = FileDescriptorProto()
    peer_pb2.DESCRIPTOR.CopyToProto(generated)
    assert without_json_names(generated) == without_json_names(written), "run `make proto` and commit what it writes"


def test_the_generated_types_are_not_stale(written: FileDescriptorProto) -> None:
    types = (ROOT / "protocol/wire/peer_pb2.pyi").read_text()
    for message in written.message_type:
        body = types.split(f"class {message.name}(", 1)[1].split("\nclass ", 1)[0]
        assert all(f"{field.name.upper()}_FIELD_NUMBER" in body for field in message.field)


def test_the_service_has_a_method_for_each_purpose(written: FileDescriptorProto) -> None:
    (service,) = written.service
    assert [method.name for method in service.method] == [purpose.value for purpose in Purpose]
    assert all(method.client_streaming and method.server_streaming for method in service.method)
