"""Messages: trees as .npy files and heads as JSON, there and back, and every way in which they are refused."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import toy
from network_runs import Network, data, federation, from_bytes, terms, to_bytes

from bespoke.core import tree
from bespoke.errors import UserError
from bespoke.network.messages import (
    Message,
    MessageError,
    Reply,
    Request,
    check_layout,
    decode,
    encode,
    layout_of,
    overhead,
    read_head,
    write_head,
)

TREE = {
    "model": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.tensor([0.1, -0.0, 1e-40], dtype=torch.float64)},
    "count": torch.tensor(7),
    "odd": torch.tensor([True, False]),
    "small": torch.tensor([[-3]], dtype=torch.int8),
    "none": {},
    "empty": torch.empty(0, 4),
}
REQUEST = Request("train", "0" * 16, "abc", "1" * 16, 3, False, 2, 1, "2" * 16, 0, 5, 1, 0)
REPLY = Reply("trained", "0" * 16, "abc", "1" * 16, 3, 2, "2" * 16, "", 0, {"loss": 0.5}, [])


def test_a_tree_comes_back_in_its_own_order_from_arrays_in_any_order():
    sent = encode(TREE)
    for leaves in (sent, sent[::-1]):
        found = decode(leaves, layout_of(TREE))
        assert toy.same_bits(found, TREE) and list(found) == list(TREE)
        assert [leaf.dtype for leaf in tree.leaves(found)] == [leaf.dtype for leaf in tree.leaves(TREE)]
    found["count"] += 1  # it owns its memory
    assert toy.same_bits(decode(sent, layout_of(TREE)), TREE)


def test_every_array_is_an_npy_file_that_numpy_reads():
    for name, content in encode(TREE):
        read = np.load(io.BytesIO(content), allow_pickle=False)
        wanted = tree.flatten(TREE)[name].numpy()
        assert read.dtype == wanted.dtype and read.shape == wanted.shape and (read == wanted).all(), name


def test_a_message_takes_its_trees_bytes_and_the_stated_overhead(tmp_path):
    network = Network(terms("pfedfda"), tmp_path)
    clients = network.clients()
    over = federation(network.terms, clients)
    clients.train(1, [0], *over.down(over.start(), [0]))
    message = from_bytes(network.wire.received[0])
    up = clients.answers.up
    numbers, stated = sum(leaf.nbytes for leaf in up.values()), overhead(up)
    assert sum(len(name.encode()) + len(content) for name, content in message.leaves) == numbers + stated
    assert stated == sum(128 + len(name) for name in up)
    assert len(to_bytes(message)) == numbers + stated + len(message.head) + 4 * (1 + 2 * len(up))
    d, classes = toy.HIDDEN, toy.CLASSES  # means, and the triangle of the covariance
    body = sum(leaf.numel() for leaf in tree.leaves({"body": network.terms.task.body(network.terms.params)}))
    assert numbers == 8 * (body + classes * d + d * (d + 1) // 2)


SENT = dict(encode(TREE))
WRONG = {
    "unknown": ([*SENT.items(), ("x" * 500, b"")], r"it holds an unknown array, 'x+\.\.\."),
    "twice": ([*SENT.items(), ("count", SENT["count"])], "it holds 'count' twice"),
    "absent": ([(n, c) for n, c in SENT.items() if n != "count"], "it does not hold 'count'"),
    "nothing": ([], "it does not hold 'model/weight'"),
    "other type": (SENT | {"count": encode({"x": torch.tensor(7.0)})[0][1]}, "its 'count' is no array of int64"),
    "other shape": (SENT | {"odd": encode({"x": torch.ones(3).bool()})[0][1]}, r"its 'odd' is no array of bool \(2,\)"),
    "no header": (SENT | {"count": b"\0" * 200}, "its 'count' is no array of int64"),
    "empty": (SENT | {"count": b""}, "its 'count' is no array of int64"),
    "short": (SENT | {"count": SENT["count"][:-1]}, "its 'count' has 135 bytes, not 136"),
    "long": (SENT | {"count": SENT["count"] + b"\0"}, "its 'count' has 137 bytes, not 136"),
    "no truth": (SENT | {"odd": SENT["odd"][:-1] + b"\2"}, "its 'odd' holds what is neither true nor false"),
}


@pytest.mark.parametrize("case", WRONG)
def test_arrays_that_are_not_the_layouts_are_refused(case):
    leaves, sentence = WRONG[case]
    with pytest.raises(MessageError, match=f"^{sentence}"):
        decode(leaves.items() if isinstance(leaves, dict) else leaves, layout_of(TREE))


def test_a_huge_declared_size_allocates_nothing(monkeypatch):
    forged = layout_of({"x": torch.empty(2**62, device="meta", dtype=torch.uint8)})["x"].header
    monkeypatch.setattr(np, "frombuffer", lambda *_, **__: pytest.fail("something was read"))
    with pytest.raises(MessageError, match="its 'count' is no array"):
        decode((SENT | {"count": forged + b"\0" * 8}).items(), layout_of(TREE))


def test_a_type_that_npy_does_not_know_cannot_be_sent():
    with pytest.raises(MessageError, match="arrays of complex64 cannot be sent"):
        encode({"x": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(UserError, match="the upload holds 'a/x' of type complex64, which cannot be sent: use float64"):
        check_layout(layout_of({"a": {"x": torch.zeros(2, dtype=torch.complex64)}}), "the upload")


def test_bfloat16_travels_as_two_raw_bytes_a_number():
    content = {"x": torch.randn(3, 5).to(torch.bfloat16), "none": torch.empty(0, dtype=torch.bfloat16)}
    leaves = dict(encode(content))
    assert len(leaves["x"]) == 128 + 2 * 15
    assert np.load(io.BytesIO(leaves["x"])).dtype == "V2"
    assert toy.same_bits(decode(leaves.items(), layout_of(content)), content)


# --- heads --------------------------------------------------------------------------------------------------------


def test_heads_come_back():
    assert read_head(write_head(REQUEST), Request) == REQUEST
    assert read_head(write_head(REPLY), Reply) == REPLY
    odd = replace(REPLY, logged={"loss": float("inf")})
    assert read_head(write_head(odd), Reply) == odd


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "its head is no JSON"),
        ("[" * 100_000, "its head is no JSON"),
        ("[]", "its head is no reply"),
        ("{}", "its head is no reply"),
        (write_head(REQUEST), "its head is no reply"),
        (json.dumps(json.loads(write_head(REPLY)) | {"more": 1}), "its head is no reply"),
        (json.dumps(json.loads(write_head(REPLY)) | {"round": 2.0}), "its head has 2.0 as 'round'"),
        (json.dumps(json.loads(write_head(REPLY)) | {"round": True}), "its head has True as 'round'"),
        (json.dumps(json.loads(write_head(REPLY)) | {"round": -1}), "its head has -1 as 'round', out of range"),
        (json.dumps(json.loads(write_head(REPLY)) | {"round": 2**53}), "its head has 9007199254740992 as 'round', out"),
        (write_head(REPLY).replace('"round": 2', '"round": ' + "9" * 5000), "its head is no JSON"),
        (json.dumps(json.loads(write_head(REPLY)) | {"logged": []}), r"its head has \[\] as 'logged'"),
        (write_head(REPLY) + " " * 2**20, r"its head has 1,048,\d+ characters, more than 1,048,576"),
    ],
)
def test_a_head_that_is_none_is_refused(text, sentence):
    with pytest.raises(MessageError, match=f"^{sentence}"):
        read_head(text, Reply)


def test_a_message_of_another_form_is_refused_by_the_node(tmp_path):
    network = Network(terms("fedavg"), tmp_path)
    request = network.clients()._request("train", 1, 0)
    for changed, why in {
        replace(request, experiment="f" * 16): "the message is of another experiment, 'ffffffffffffffff'",
        replace(request, federation="../../elsewhere"): "the message's head makes no sense",
        replace(request, accepted=1, version="../x"): "the message's head makes no sense",
        replace(request, kind="erase"): "the message's head makes no sense",
        replace(request, round=0): "the message's head makes no sense",
        replace(request, new=True): "client 0 is not where the message says",
        request: "it does not hold 'model/body.weight'",
    }.items():
        reply = read_head(network.node("key 0").answer(Message(write_head(changed))).head, Reply)
        assert (reply.kind, reply.why[: len(why)]) == ("failed", why)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["server"]
    assert data().num_clients == 3
