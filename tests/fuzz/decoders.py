"""All decoders of bytes from outside: sources of valid bytes, functions that read them, and errors that they may raise."""

from __future__ import annotations

import functools
import io
import json
import sqlite3
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import trio
import trio.testing
from hypothesis import strategies as st

from ledger import jobs
from ledger.core.genesis import Founder, Genesis
from ledger.core.module import Refused
from ledger.ledger_state import EMPTY_BODY, UnsupportedModuleVersion, decode_body, newest_module_versions
from peer.api import control_socket
from peer.api.rpc_handlers import rpc_methods
from peer.features import modules_of, worker_requests
from peer.settings import config
from peer.settings.invitation import invitation_text, make_invitation, parse_invitation
from protocol import codec
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import Identity, Signed, open_signed, parse_peer_id, peer_id, sign_message
from protocol.messages import AGREEMENT_MESSAGES, GOSSIP_MESSAGES, Status, Transaction
from rlhf.data.preference_sets import PreferencePair, decode_records, encode_records
from storage import ledger_integrity
from tests.fuzz import wire
from tests.fuzz.strategies import strategy_of
from tests.ledger.world import LANGUAGE, PEOPLE, PlainJobs, World
from tests.peer.nodes import Pack
from tests.sim.keys import FastVerifier
from tests.transport.helpers import ALICE, BOB, exchange_bytes, make_session
from training import random_stream, worker_protocol
from training.corpus import DataManifest
from training.data.text_files import read_text
from training.data.tokenizer import load_tokenizer
from training.formats import checkpoint, packed_model
from training.job_spec import BITS, JobSpec
from training.replicated import codec as payloads
from training.replicated.tensor_layout import TensorLayout, initial_parameters, layout_from_shapes, layout_of
from training.transformer import ModelSpec, model_tensors
from transport.network import DataReceived
from transport.wire.framing import Channel, Inbox, Outbox, Priority

READ_BYTES_FACTOR = 6  # memory while decoding, per byte of input: the input's own copies inside the value
READ_BYTES_FIXED = 256 << 10  # memory for any input, once the readers of all types are built
LOCAL = frozenset({"control socket"})  # read for programs of the same person, who may fill the memory anyway
STATE_BYTES_FACTOR = 48  # bound of tables and specifications, whose entries are small objects; no message of a stranger holds one


@dataclass(frozen=True)
class Decoder:
    name: str
    valid: st.SearchStrategy[bytes]
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes] | None = None  # None: the form is not canonical, or the value is not kept
    refuses: tuple[type[Exception], ...] = (RemoteProtocolError,)
    bytes_factor: int = READ_BYTES_FACTOR
    always: bool = True  # all valid data are accepted; a transaction may be well formed and still not apply

    def accepts(self, data: bytes) -> bool:
        """Return whether `data` is accepted. Accepted data must encode to the same bytes again."""
        try:
            value = self.decode(data)
        except self.refuses:
            return False
        if self.encode is not None:
            assert self.encode(value) == data, f"{self.name}: {data.hex()} is read, and written as {self.encode(value).hex()}"
        return True


@functools.cache
def decoders() -> dict[str, Decoder]:
    decided = [
        kind for module in modules_of(PlainJobs()) for kind in (module.state_type, *dict.fromkeys(module.contents.values()))
    ]
    found = (
        [_of_message(kind) for kind in wire.messages()]
        + [_of_record(kind) for kind in dict.fromkeys((*wire.records(), *decided))]
        + _special()
    )
    assert len({decoder.name for decoder in found}) == len(found)
    return {decoder.name: decoder for decoder in found}


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _of_message(kind: type) -> Decoder:
    def decode(data: bytes) -> Any:
        return codec.decode_message(data, (Status, kind))

    return Decoder(_qualified(kind), strategy_of(kind).map(codec.encode), decode, codec.encode)


def _of_record(kind: type) -> Decoder:
    def decode(data: bytes) -> Any:
        return codec.decode(kind, data, len(data))

    factor = READ_BYTES_FACTOR if kind.__module__.startswith(("protocol", "consensus", "rounds")) else STATE_BYTES_FACTOR
    return Decoder(_qualified(kind), strategy_of(kind).map(codec.encode), decode, codec.encode, bytes_factor=factor)


# Decoders with further checks ----------------------------------------------------------------------------------------

SPEC = JobSpec(name="t", data=bytes(32), model=ModelSpec(context=32, width=32, layers=1, heads=2, kv_heads=1, hidden=48))
SCRATCH = JobSpec(name="s", objective="scratch", data=bytes(32))
FOUNDERS = {key: Founder("a", ("trainer",)) for key in (bytes(32), b"\x01" * 32)}
GENESIS = Genesis("net", 5, bytes(16), FOUNDERS, newest_module_versions(modules_of(PlainJobs())))


def _special() -> list[Decoder]:
    return [
        _of_class(JobSpec, SPEC, SCRATCH),
        _of_class(Genesis, GENESIS),
        _of_class(
            DataManifest,
            DataManifest(3, bytes(32), (bytes(32),)),
            DataManifest((1 << 20) + 1, bytes(32), (bytes(32), bytes([1]) * 32)),
        ),
        _signed(),
        _peer_ids(),
        _invitations(),
        *_payloads(),
        _checkpoints(),
        _packed_models(),
        _tokenizers(),
        _preferences(),
        _frames(),
        _sessions(),
        _pipe(),
        _control(),
        _configuration(),
        _training_text(),
        _write_ahead_log(),
        _node(),
        *_ledger(),
    ]


def _of_class(kind: Any, *examples: Any) -> Decoder:
    encoded = [codec.encode(example) for example in examples]
    return Decoder(
        f"{kind.__name__}.decode", st.sampled_from(encoded), kind.decode, codec.encode, bytes_factor=STATE_BYTES_FACTOR
    )


def _signed() -> Decoder:
    message = Transaction(1, 2, "member/resign", b"")
    examples = [codec.encode(sign_message(person, bytes(32), message)) for person in PEOPLE[:3]]

    def decode(data: bytes) -> Signed:
        signed = codec.decode(Signed, data)
        assert open_signed(signed, bytes(32), FastVerifier(), (Transaction,)) == message, "nothing else was signed"
        return signed

    return Decoder("open_signed", st.sampled_from(examples), decode, codec.encode)


def _peer_ids() -> Decoder:
    def decode(data: bytes) -> bytes:
        return parse_peer_id(data.decode(errors="replace"))

    return Decoder("parse_peer_id", strategy_of(codec.Key).map(lambda key: peer_id(key).encode()), decode, refuses=(UserError,))


def _invitations() -> Decoder:
    text = invitation_text(make_invitation(Identity(bytes(32)), GENESIS, 7, ("127.0.0.1:7700",))).encode()

    def decode(data: bytes) -> Any:
        return parse_invitation(data.decode(errors="replace"))

    return Decoder("parse_invitation", st.just(text), decode, refuses=(UserError,), bytes_factor=64)


def _payloads() -> Iterator[Decoder]:
    """Yield decoders of payloads for each number of bits: with one chunk, and with short chunks and several blocks."""
    for bits in BITS:
        yield _payload(bits, layout_of(SCRATCH), "one chunk")
        yield _payload(bits, layout_from_shapes([("a", (3, 7)), ("b", (5000,)), ("c", (1,))]), "short chunks")


def _payload(bits: int, layout: TensorLayout, what: str) -> Decoder:
    header = payloads.PayloadHeader(bytes(32), 3, b"t" * 32, b"r" * 32, 10, 8, bits)
    m = random_stream.irwin_hall_integers(layout.size, "fuzz").astype(np.float32)
    examples = [payloads.encode_payload(header, m * np.float32(scale), layout) for scale in (0, 1e-3, 1e-9)]

    def decode(data: bytes) -> payloads.QuantizedUpdate:
        update = payloads.decode_payload(data, header, layout)
        assert update.dequantize().shape == (layout.size,) and update.norm_squared() >= 0
        return update

    name = f"payload {bits} bits, {what}"
    return Decoder(name, st.sampled_from(examples), decode, payloads.QuantizedUpdate.encode, bytes_factor=STATE_BYTES_FACTOR)


@functools.cache
def _folder() -> Path:
    place = tempfile.TemporaryDirectory(prefix="folkmoot-fuzz-")  # deleted when the process ends
    _kept.append(place)
    return Path(place.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


def _checkpoints() -> Decoder:
    def decode(data: bytes) -> Any:
        path = _folder() / "changed.safetensors"
        path.write_bytes(data)
        return checkpoint.read_checkpoint(path)

    def example() -> bytes:
        path = _folder() / "valid.safetensors"
        checkpoint.write_checkpoint(path, SPEC, initial_parameters(SPEC), checkpoint.CheckpointOrigin(bytes(32), 1, bytes(32)))
        return path.read_bytes()

    return Decoder("checkpoint", st.builds(functools.cache(example)), decode, refuses=(UserError,), bytes_factor=64)


def _packed_models() -> Decoder:
    model = ModelSpec(context=16, width=8, layers=1, heads=2, kv_heads=1, hidden=8, linear="ternary")
    names = {name: name for name in model_tensors(model)}

    def decode(data: bytes) -> Any:
        path = _folder() / "changed-packed.safetensors"
        path.write_bytes(data)
        return packed_model.read_packed(path, model, names)

    def example() -> bytes:
        tensors = model_tensors(model).items()
        stream = io.BytesIO()
        packed_model.write_packed(
            stream, model, names, {name: np.ones(of.parameter.shape, dtype=np.float32) for name, of in tensors}
        )
        return stream.getvalue()

    return Decoder("packed model", st.builds(functools.cache(example)), decode, refuses=(UserError,), bytes_factor=64)


def _preferences() -> Decoder:
    examples = [[PreferencePair(bytes([number]), "q", "a", "b", 500) for number in range(count)] for count in (1, 3)]

    def encode(pairs: list[PreferencePair]) -> bytes:
        return b"".join(encode_records(pairs))

    def decode(data: bytes) -> list[PreferencePair]:
        return decode_records(io.BytesIO(data), PreferencePair)

    return Decoder("preferences", st.sampled_from(examples).map(encode), decode, encode, bytes_factor=STATE_BYTES_FACTOR)


def _tokenizers() -> Decoder:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = [chr(byte) if byte in printable else None for byte in range(256)]
    extra = iter(range(256, 512))
    tokens = [character or chr(next(extra)) for character in characters]
    model = {"type": "BPE", "vocab": {token: i for i, token in enumerate([*tokens, "ab"])}, "merges": [["a", "b"]]}
    text = json.dumps({"model": model}).encode()

    def decode(data: bytes) -> Any:
        return load_tokenizer(data, 256).decode([0, 255])

    return Decoder("tokenizer", st.just(text), decode, bytes_factor=128)


def _frames() -> Decoder:
    def frame(parts: list[bytes]) -> bytes:
        outbox = Outbox()
        for index, part in enumerate(parts):
            outbox.push(Channel.APPLICATION, part, Priority(index % 3))
        return outbox.next_frame(400)

    def decode(data: bytes) -> Any:
        inbox = Inbox()
        return inbox.receive_frame(data) + inbox.receive_frame(data)  # the first one may leave a message unfinished

    return Decoder("Inbox.take", st.lists(st.binary(max_size=300), max_size=5).map(frame), decode, bytes_factor=128)


def _sessions() -> Decoder:
    """Return a decoder of the bytes of an initiator, from the preamble on, with two frames."""

    class Recorder(bytearray):
        def module_state(self, session: Any) -> Any:
            send = session.data_to_send

            def recorded() -> bytes:
                data: bytes = send()
                self.extend(data)
                return data

            session.data_to_send = recorded
            return session

    said = Recorder()
    initiator, responder = said.module_state(make_session(ALICE, True)), make_session(BOB, False)
    exchange_bytes(initiator, responder)
    for part in (b"a", bytes(300)):
        initiator.outbox.push(Channel.APPLICATION, part, Priority.VOTE)
        exchange_bytes(initiator, responder)

    def decode(data: bytes) -> Any:
        session = make_session(BOB, False)
        return session.receive(data[:40]) + session.receive(data[40:])

    return Decoder("Session.receive", st.just(bytes(said)), decode, bytes_factor=STATE_BYTES_FACTOR)


def _pipe() -> Decoder:
    messages = worker_protocol.messages_from_worker(worker_requests().values())

    def decode(data: bytes) -> Any:
        # a pipe waits for the rest of a shorter frame
        header = data[: worker_protocol.FRAME_HEADER_BYTES].ljust(worker_protocol.FRAME_HEADER_BYTES, b"\0")
        length, number = worker_protocol.parse_header(header)
        return number, worker_protocol.parse_body(data[worker_protocol.FRAME_HEADER_BYTES :][:length], messages)

    values = st.one_of(*map(strategy_of, messages))
    return Decoder("worker pipe", st.builds(worker_protocol.encode_frame, st.integers(0, 2**32 - 1), values), decode)


# Types of contents by kind of transaction.
CONTENTS: dict[str, type] = {kind: content for module in modules_of(PlainJobs()) for kind, content in module.contents.items()}


class _Anybody:
    """An implementation of `PeerApi` in which every method returns nothing."""

    def __getattr__(self, name: str) -> Any:
        async def answer(*arguments: Any) -> None:
            return None

        async def parts(*arguments: Any) -> AsyncGenerator[None, None]:
            yield None

        return parts if rpc_methods()[name].is_streamed else answer


def _control() -> Decoder:
    requests = st.sampled_from(sorted(rpc_methods().items())).flatmap(
        lambda item: st.tuples(st.just(item[0]), st.tuples(*map(strategy_of, item[1].argument_types.values())))
    )
    valid = requests.map(lambda call: codec.encode([control_socket.VERSION, call[0], call[1]]))

    def decode(data: bytes) -> Any:
        reply = trio.run(control_socket._reply, _Anybody(), codec.unpack(data, len(data)), trio.testing.MemorySendStream())
        assert reply is not None
        if reply[0] != "ok":
            raise RemoteProtocolError("refused", reply[1])
        return reply

    return Decoder("control socket", valid, decode)


def _configuration() -> Decoder:
    directory = {"data_directory": "/nowhere"}
    text = config.format_settings(config.load_settings({**directory, "bootstrap": ("a:1", "[::1]:2")}, {})).encode()

    def decode(data: bytes) -> Any:
        file = _folder() / "peer.toml"
        file.write_bytes(data)
        return config.load_settings(directory, {}, file)

    return Decoder("configuration", st.just(text), decode, refuses=(UserError,), bytes_factor=256)


def _training_text() -> Decoder:
    text = "".join(json.dumps({"text": word * 9, "more": [1]}) + "\n" for word in ("ä", "two ", "\u2028")).encode()

    def decode(data: bytes) -> Any:
        file = _folder() / "text.jsonl"
        file.write_bytes(data)
        return b"".join(read_text(file)).decode()

    return Decoder("read_text", st.just(text), decode, refuses=(UserError,), bytes_factor=64)


def _write_ahead_log() -> Decoder:
    def example() -> bytes:
        path = _folder() / "example.sqlite"
        database = sqlite3.connect(path, isolation_level=None)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA page_size=512")
        database.execute("CREATE TABLE t (x)")
        database.execute("INSERT INTO t VALUES (zeroblob(300))")
        log = path.with_name(f"{path.name}-wal").read_bytes()
        database.close()
        return log

    def decode(data: bytes) -> Any:
        found = ledger_integrity.find_log_damage(data)
        assert found is None or isinstance(found, str)
        return found

    return Decoder("wal.damage", st.builds(functools.cache(example)), decode, bytes_factor=64)


def _node() -> Decoder:
    """Return a decoder of the messages of a link, with all their handlers, in a peer in the middle of a round."""
    pack = Pack(voters=4, count=4)
    pack[0].say(pack.world.tx(PEOPLE[0], "job/start", jobs.StartJob(LANGUAGE)))
    pack.until(lambda shell: bool(shell.node.ledger.rounds))
    sender, me = pack[0].me, pack[1]
    recorded = [codec.encode(message) for shell in pack for _, message in shell.sent]
    kinds = st.one_of(*map(strategy_of, (*AGREEMENT_MESSAGES, *GOSSIP_MESSAGES)))

    def decode(data: bytes) -> Any:
        turn = me.node.step([DataReceived(sender, data)], pack.now)
        for fault in turn.faults:
            raise fault.error
        return turn

    valid = st.one_of(st.sampled_from(recorded), kinds.map(codec.encode))
    return Decoder("Node.turn", valid, decode, None, (RemoteProtocolError,), STATE_BYTES_FACTOR, always=False)


def _ledger() -> list[Decoder]:
    world = World()
    rules, state = world.rules, world.state
    contents = st.one_of(
        *(
            st.builds(lambda content, kind=kind: world.tx(PEOPLE[1], kind, content), strategy_of(content))
            for kind, content in CONTENTS.items()
        ),
        st.sampled_from([world.tx(PEOPLE[0], "member/resign", CONTENTS["member/resign"]()), world.admission(PEOPLE[9])]),
    )

    def apply(data: bytes) -> Any:
        return rules.apply_transaction(state, codec.decode(Signed, data))

    def check(data: bytes) -> Any:
        problem = rules.why_body_refused(state, data)
        if problem is not None:
            raise RemoteProtocolError("refused", problem)
        return data

    def decode_state(data: bytes) -> bytes:
        return rules.encode_state(rules.decode_state(data))

    def opened(data: bytes) -> Any:
        """Apply the data as content with a valid signature, since a member may sign anything."""
        return rules.apply_transaction(state, sign_message(PEOPLE[1], world.chain, codec.decode(Transaction, data)))

    def unsigned(signed: Signed) -> bytes:
        return signed.body

    refuses = (Refused, RemoteProtocolError, UnsupportedModuleVersion)
    encoded_state = rules.encode_state(world.decide(world.tx(PEOPLE[0], "member/resign", CONTENTS["member/resign"]())))
    empty = decode_body(EMPTY_BODY)
    bodies = contents.map(lambda signed: codec.encode(replace(empty, transactions=(signed,))))
    return [
        Decoder("Rules.apply_transaction", contents.map(codec.encode), apply, None, refuses, STATE_BYTES_FACTOR, False),
        Decoder("Rules.apply_transaction, well signed", contents.map(unsigned), opened, None, refuses, STATE_BYTES_FACTOR, False),
        Decoder("Rules.problem", bodies, check, _same, refuses, STATE_BYTES_FACTOR, False),
        Decoder(
            "Ledger.expand",
            bodies.map(world.ledger.make_compact_body),
            world.ledger.expand_body,
            None,
            refuses,
            STATE_BYTES_FACTOR,
        ),
        Decoder("Rules.decode_state", st.just(encoded_state), decode_state, _same, refuses, STATE_BYTES_FACTOR),
    ]


def _same(data: bytes) -> bytes:
    return data
