"""The index of a checkpoint: what it refuses, and how it is compared with objects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backhaul.checkpoint.index import (
    VERSION,
    Entry,
    Index,
    Model,
    Optimizer,
    State,
    Value,
    decode,
    encode,
    file_name,
    is_data_name,
    model_problems,
    optimizer_problems,
    shortened,
)
from backhaul.errors import BackhaulError

DATA = "data-" + "0123456789abcdef" * 2
WEIGHT = Entry("worker1.pt", (2, 3), "float32")
EXTRA = Entry("worker1.pt")


def index(**changes: Any) -> Index:
    fields: dict[str, Any] = {
        "data": DATA,
        "common": "common.pt",
        "files": {"common.pt": 10, "worker1.pt": 20},
        "objects": {
            "model": Model({"b": WEIGHT, "a": EXTRA}),
            "adam": Optimizer((1, 1), (WEIGHT, Entry(None, (), "float64"))),
            "scheduler": State(),
            "epoch": Value(),
        },
    }
    return Index(**{**fields, **changes})


def changed(*path: Any, to: Any) -> bytes:
    """The bytes of an index with one field changed."""
    content = json.loads(encode(index()))
    place = content
    for key in path[:-1]:
        place = place[key]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(content).encode()


def test_an_encoded_index_is_decoded_to_the_same() -> None:
    found = decode(encode(index()))
    assert found == index()
    assert list(found.of_kind(Model)["model"].keys) == ["b", "a"]  # in their order
    assert found.of_kind(State) == {"scheduler": State()}
    assert found.of_kind(Value) == {"epoch": Value()}


def test_an_index_is_plain_json() -> None:
    content = json.loads(encode(index()))
    assert list(content) == ["format", "version", "data", "common", "files", "objects"]
    assert content["version"] == VERSION == 1
    assert content["objects"]["model"]["keys"]["b"] == {"file": "worker1.pt", "shape": [2, 3], "dtype": "float32"}
    assert content["objects"]["epoch"] == {"kind": "value"}


def test_unknown_fields_of_an_index_are_ignored() -> None:
    assert decode(changed("remark", to="written on a Sunday")) == index()


@pytest.mark.parametrize("length", range(0, len(encode(index())) - 2, 7))
def test_a_truncated_index_is_refused(length: int) -> None:
    with pytest.raises(BackhaulError, match="it is damaged"):
        decode(encode(index())[:length])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "damaged, or not the index of a checkpoint"),
        (b'{"weight_map": {}}', "damaged, or not the index of a checkpoint"),
        (b"\xff\xfe", "damaged, or not the index of a checkpoint"),
        (b"[" * 100_000, "damaged, or not the index of a checkpoint"),
        (changed("format", to="another"), "its format is 'another', not 'backhaul checkpoint'"),
        (changed("version", to=2), "it has version 2, but this Backhaul reads version 1; install"),
        (changed("objects", "model", "kind", to="picture"), "it is damaged: Invalid value 'picture'"),
        (changed("objects", "model", "keys", "b", "shape", to=[2, -3]), r"it is damaged: Expected `int` >= 0"),
        (changed("objects", "model", "keys", "b", "shape", to="2x3"), "it is damaged: Expected `array"),
        (changed("objects", "model", "keys", "b", "file", to="worker9.pt"), "'worker9.pt' of 'model' is not one of"),
        (changed("objects", "model", "keys", "b", "file", to="common.pt"), "'common.pt' of 'model' is not one of"),
        (changed("objects", "model", "keys", "b", "file", to=None), "missing required field `file`|has no file"),
        (changed("objects", "adam", "groups", to=[3]), "the groups of 'adam' have 3 parameters, but there are 2"),
        (changed("files", "worker1.pt", to=None), "'worker1.pt' of 'model' is not one of those listed"),
        (changed("files", "worker1.pt", to=-1), r"it is damaged: Expected `int` >= 0"),
        (changed("common", to="other.pt"), "the file 'other.pt' is not listed"),
        (changed("data", to=None), "missing required field `data`"),
    ],
)
def test_a_damaged_index_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(BackhaulError, match=message):
        decode(content)


@pytest.mark.parametrize(
    "name",
    ["..", ".", "", "/tmp", "data-1", DATA.upper(), f"{DATA}/..", f"../{DATA}", f"{DATA}\n", f"{DATA}0", f"x{DATA}"],
)
def test_a_data_directory_is_beside_the_index(name: str) -> None:
    with pytest.raises(BackhaulError, match="is not the name of a data directory"):
        decode(changed("data", to=name))


@pytest.mark.parametrize(
    "name",
    [
        "../secret.pt",
        "/etc/secret.pt",
        "a/b.pt",
        ".pt",
        "..pt",
        ".hidden.pt",
        "a.pt\n",
        "a.txt",
        "a\0.pt",
        "-a.pt",
        "ä.pt",
    ],
)
def test_a_file_is_in_the_data_directory(name: str) -> None:
    with pytest.raises(BackhaulError, match="is not the name of a file in the data directory"):
        decode(changed("files", name, to=1))


def test_no_index_is_written_that_could_not_be_read() -> None:
    with pytest.raises(BackhaulError, match="is not the name of a file"):
        encode(index(files={"common.pt": 1, "../worker1.pt": 2}))


def test_the_name_of_a_data_directory() -> None:
    assert is_data_name(DATA)
    assert not is_data_name("data-mine")


@pytest.mark.parametrize(
    ("worker", "name"),
    [
        ("worker0", "worker0.pt"),
        ("trainer/3", "trainer_3.pt"),
        ("../../etc/passwd", "_.._etc_passwd.pt"),
        ("...", "worker.pt"),
        ("Änne", "_nne.pt"),
        ("common", "common-1.pt"),
        ("COMMON", "COMMON-1.pt"),
        ("taken", "taken-2.pt"),
        ("w" * 128, "w" * 128 + ".pt"),
    ],
)
def test_the_file_of_a_worker(worker: str, name: str) -> None:
    taken = ["common.pt", "taken.pt", "Taken-1.pt"]
    assert file_name(worker, taken) == name
    decode(encode(index(files={"common.pt": 1, "worker1.pt": 1, name: 1})))  # so it can be in an index


def test_a_model_that_fits() -> None:
    saved = Model({"weight": WEIGHT, "extra": EXTRA})
    assert not model_problems(saved, {"extra": Entry(), "weight": Entry(None, (2, 3), "float32")})
    # torch converts types, and gives a lazy parameter the shape of the saved one.
    assert not model_problems(saved, {"extra": Entry(), "weight": Entry(None, (2, 3), "float16")})
    assert not model_problems(saved, {"extra": Entry(), "weight": Entry()})


def test_a_model_that_does_not_fit() -> None:
    saved = Model({"weight": WEIGHT, "old": WEIGHT})
    problems = model_problems(saved, {"weight": Entry(None, (3, 2), "float32"), "new": Entry(None, (1,), "int64")})
    assert problems == [
        "the checkpoint has no 'new'",
        "the module has no 'old'",
        "'weight' has shape [2, 3] in the checkpoint and [3, 2] in the module",
    ]


def test_an_optimizer_that_does_not_fit() -> None:
    saved = Optimizer((1, 2), (WEIGHT, WEIGHT, Entry(None, (), "float32")))
    same = [Entry(None, (2, 3)), Entry(None, (2, 3)), Entry(None, ())]
    assert not optimizer_problems(saved, [1, 2], same)
    assert optimizer_problems(saved, [1, 1], same[:2]) == ["the checkpoint has 3 parameters and the optimizer 2"]
    assert optimizer_problems(saved, [3], same) == [
        "the parameter groups of the checkpoint have 1 + 2 parameters, those of the optimizer 3"
    ]
    assert optimizer_problems(saved, [1, 2], [same[2], same[1], same[0]]) == [
        "parameter 0 has shape [2, 3] in the checkpoint and [] in the optimizer",
        "parameter 2 has shape [] in the checkpoint and [2, 3] in the optimizer",
    ]


def test_messages_do_not_get_long() -> None:
    (problem,) = model_problems(Model({}), {f"layer{number}": WEIGHT for number in range(50)})
    assert problem.startswith("the checkpoint has no 'layer0', 'layer1', ")
    assert problem.endswith("'layer7' and 42 more")
    assert shortened(["one", "two"]) == "\n  one\n  two"
    assert shortened([str(number) for number in range(20)]).endswith("\n  7\n  and 12 more")
