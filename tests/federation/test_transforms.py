"""Transforms alone, compared with plain torch; and what a receiver makes of compressed tensors."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backhaul.edges.accounting import Mechanism, epsilon_of
from backhaul.edges.compression import Compression, coded, devices_of, expanded
from backhaul.edges.crossing import Crossing, Feedback
from backhaul.edges.edge import edge_to
from backhaul.edges.transforms import gaussian
from backhaul.errors import MisuseError, OptionError, ProtocolError, QuotaError
from backhaul.federation import BFloat16, Clip, Edge, GaussianNoise, Int8, TopK, Transform
from backhaul.wire.messages import Coded

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def some(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Clipping.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("norm", [0.5, 3.0, 1e6])
def test_clipping_a_tensor_is_torch_s(dtype: torch.dtype, norm: float) -> None:
    x = some(5, 7, dtype=dtype)
    parameter = torch.nn.Parameter(torch.zeros_like(x))
    parameter.grad = x.clone()
    torch.nn.utils.clip_grad_norm_(parameter, norm)
    assert torch.equal(Clip(norm, per="tensor")(x), parameter.grad)


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 5), ()])
def test_clipping_rows(shape: tuple[int, ...]) -> None:
    x = some(*shape, dtype=torch.float64) * 3
    found = Clip(1.5)(x)
    for row, clipped in zip(
        x.reshape(shape[0] if shape else 1, -1), found.reshape(shape[0] if shape else 1, -1), strict=True
    ):
        size = row.norm()
        torch.testing.assert_close(clipped, row if size < 1.5 else row * (1.5 / (size + 1e-6)), rtol=1e-12, atol=0)
        assert clipped.norm() <= 1.5


def test_the_gradient_of_clipping_is_that_of_the_computation() -> None:
    x = some(4, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(Clip(0.9), (x,))


def test_rows_that_are_not_finite_leave_as_zeros(caplog: pytest.LogCaptureFixture) -> None:
    x = some(4, 3)
    x[1, 0], x[2, 1], x[3, 2] = math.nan, math.inf, 3e38
    found = Clip(1.0)(x)
    assert torch.equal(found[1:3], torch.zeros(2, 3))
    assert found.isfinite().all()
    assert (found.norm(dim=1) <= 1.0).all()
    assert "2 rows that leave over an edge are not finite" in caplog.text


def test_clipping_nothing() -> None:
    assert Clip(1.0)(torch.zeros(0, 3)).shape == (0, 3)


# Noise.

SAMPLES = 1_000_000


def test_the_noise_is_normal() -> None:
    """The bounds are six standard deviations of each estimate: one run in a hundred million fails."""
    noise = gaussian(SAMPLES)
    assert noise.dtype is torch.float64
    assert abs(noise.mean()) < 6 / math.sqrt(SAMPLES)
    assert abs(noise.var() - 1) < 6 * math.sqrt(2 / SAMPLES)
    assert abs(noise.pow(3).mean()) < 6 * math.sqrt(15 / SAMPLES)
    assert abs(noise.pow(4).mean() - 3) < 6 * math.sqrt(96 / SAMPLES)
    for bound in (0.5, 1.0, 2.0, 3.0):
        share = math.erf(bound / math.sqrt(2))
        assert abs((noise.abs() < bound).double().mean() - share) < 6 * math.sqrt(share * (1 - share) / SAMPLES)
    halves = noise.reshape(2, -1)  # the sines and cosines of each piece
    assert abs((halves[0] * halves[1]).mean()) < 6 / math.sqrt(SAMPLES / 2)
    assert abs((noise[1:] * noise[:-1]).mean()) < 6 / math.sqrt(SAMPLES)


@pytest.mark.parametrize("count", [0, 1, 2, 3, (1 << 20) + 1])
def test_gaussian_returns_the_requested_count(count: int) -> None:
    assert gaussian(count).shape == (count,)


def test_the_noise_does_not_come_from_the_generator_that_others_may_have_seeded() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        found.append(GaussianNoise(std=1.0)(torch.zeros(100)))
        assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(*found)


def test_a_generator_for_experiments_that_are_repeated() -> None:
    def noise() -> Tensor:
        return GaussianNoise(std=2.0, generator=torch.Generator().manual_seed(4))(torch.zeros(3, dtype=torch.float64))

    assert torch.equal(noise(), noise())
    assert torch.equal(noise(), 2 * torch.randn(3, generator=torch.Generator().manual_seed(4), dtype=torch.float64))


def test_the_gradient_of_noise_is_one() -> None:
    x = some(3, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(GaussianNoise(std=5.0)(x), x, some(3, 3, seed=1))
    assert torch.equal(gradient, some(3, 3, seed=1))


def test_the_noise_of_a_chain_is_a_multiple_of_the_clip() -> None:
    crossing = Crossing("bank", Edge(on_send=[Clip(4.0), GaussianNoise(0.5)], on_gradient=[]))
    (found,), _ = crossing.values(None, [torch.zeros(1000, 1000, dtype=torch.float64)])
    assert abs(found.std() - 2.0) < 6 * 2.0 / math.sqrt(2 * SAMPLES)


# Compression.


@pytest.mark.parametrize("dtype", DTYPES)
def test_bfloat16_is_the_cast(dtype: torch.dtype) -> None:
    x = some(5, 7, dtype=dtype)
    assert torch.equal(BFloat16()(x), x.to(torch.bfloat16).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_int8_is_within_half_a_step_of_each_row(dtype: torch.dtype) -> None:
    x = some(6, 20, dtype=dtype)
    x[3] = 0
    found = Int8()(x)
    steps = x.abs().amax(dim=1, keepdim=True) / 127
    assert ((found - x).abs() <= steps * 0.5001).all()
    assert torch.equal(found[3], x[3])
    torch.testing.assert_close(found, (x / steps.where(steps > 0, 1.0)).round() * steps)


@pytest.mark.parametrize("shape", [(40,), (40, 3), ()])
def test_int8_has_one_scale_for_short_rows(shape: tuple[int, ...]) -> None:
    x = some(*shape)
    step = x.abs().max() / 127
    torch.testing.assert_close(Int8()(x), (x / step).round() * step)
    assert Int8().compress(x)[1].shape == (1,)


def test_int8_refuses_tensors_without_a_scale() -> None:
    with pytest.raises(MisuseError, match="not finite"):
        Int8()(torch.tensor([1.0, math.inf]))


@pytest.mark.parametrize(("fraction", "count"), [(0.1, 4), (0.5, 18), (1.0, 36), (1e-9, 1)])
def test_top_k_keeps_the_largest_as_they_are(fraction: float, count: int) -> None:
    x = some(4, 9)
    found = TopK(fraction)(x)
    kept = found != 0
    assert kept.sum() == count
    assert torch.equal(found[kept], x[kept])
    assert count == 36 or x[~kept].abs().max() <= x[kept].abs().min()


@pytest.mark.parametrize("compression", [BFloat16(), Int8(), TopK(0.25)])
def test_gradients_pass_straight_through(compression: Compression) -> None:
    x = some(4, 4).requires_grad_()
    given = some(4, 4, seed=1)
    (gradient,) = torch.autograd.grad(compression(x), x, given)
    assert torch.equal(gradient, given)


@pytest.mark.parametrize("compression", [BFloat16(), Int8(), TopK(0.25)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 4), (5,), (), (0, 3), (2, 3, 4)])
def test_the_receiver_gets_the_values_that_the_sender_computed(
    compression: Compression, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    crossing = Crossing("bank", Edge(on_send=[compression], on_gradient=[]))
    other = torch.arange(3.0)
    x = some(*shape, dtype=dtype).requires_grad_()
    leaving = crossing.values(None, [x, other])
    sent, codes = leaving.wired(leaving.tensors)
    found = expanded(codes, sent, 1 << 20)
    assert len(found) == 2
    assert torch.equal(found[0], leaving.tensors[0])
    assert (found[0].dtype, found[0].shape, found[0].requires_grad) == (dtype, x.shape, True)
    assert not found[1].requires_grad
    if dtype in (torch.float64, torch.float32) and x.numel() > 10:
        assert sum(part.nbytes for part in sent) < x.nbytes + other.nbytes


def one(code: str, *parts: Tensor, dtype: str = "float32", shape: Any = (2,), place: int = 0) -> Any:
    return [Coded(place, code, dtype, shape)], list(parts)


ints = torch.zeros(2, dtype=torch.int32)
BAD: dict[str, Callable[[], Any]] = {
    "a code that there is not": lambda: one("zip", torch.zeros(2)),
    "a dtype that there is not": lambda: one("bf16", torch.zeros(2, dtype=torch.bfloat16), dtype="int64"),
    "another shape": lambda: one("bf16", torch.zeros(3, dtype=torch.bfloat16)),
    "another dtype": lambda: one("bf16", torch.zeros(2)),
    "no scales": lambda: one("int8", torch.zeros(2, dtype=torch.int8)),
    "too many scales": lambda: one("int8", torch.zeros(2, dtype=torch.int8), torch.zeros(2)),
    "scales of integers": lambda: one("int8", torch.zeros(2, dtype=torch.int8), ints),
    "a place outside": lambda: one("topk", torch.zeros(2), ints + 2),
    "a negative place": lambda: one("topk", torch.zeros(2), ints - 1),
    "places that are no integers": lambda: one("topk", torch.zeros(2), torch.zeros(2)),
    "more values than numbers": lambda: one("topk", torch.zeros(1).expand(1 << 40), ints[:1].expand(1 << 40)),
    "a tensor outside": lambda: one("bf16", torch.zeros(2, dtype=torch.bfloat16), place=1),
    "a negative tensor": lambda: one("bf16", torch.zeros(2, dtype=torch.bfloat16), place=-1),
    "one twice": lambda: (
        [Coded(0, "bf16", "float32", (2,)), Coded(0, "bf16", "float32", (2,))],
        [torch.zeros(2, dtype=torch.bfloat16)],
    ),
    "far too large": lambda: one("topk", torch.zeros(1), ints[:1], shape=(1 << 40,)),
    "large and empty": lambda: one("topk", torch.zeros(0), ints[:0], shape=(0, 1 << 40)),
    "negative sizes": lambda: one("topk", torch.zeros(1), ints[:1], shape=(-4, -4)),
    "sizes that overflow": lambda: one("topk", torch.zeros(1), ints[:1], shape=(1 << 63, 2)),
    "a hundred dimensions": lambda: one("topk", torch.zeros(1), ints[:1], shape=(1,) * 100),
    "sparse": lambda: one("bf16", torch.zeros(2, dtype=torch.bfloat16).to_sparse()),
    "no memory": lambda: one("bf16", torch.zeros(2, dtype=torch.bfloat16, device="meta")),
    "many of them": lambda: (
        [Coded(place, "topk", "float64", (1 << 16,)) for place in range(8)],
        [torch.zeros(1)] * 8 + [ints[:1]] * 8,
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_invalid_compressed_tensors_are_refused(what: str) -> None:
    codes, tensors = BAD[what]()
    with pytest.raises(ProtocolError, match="compressed tensor"):
        expanded(codes, tensors, 1 << 20)


shapes = st.lists(st.sampled_from([-1, 0, 1, 2, 3, 16, 1 << 20, 1 << 40, 1 << 62]), max_size=3).map(tuple)
codes = st.builds(
    Coded,
    st.integers(-1, 3),
    st.sampled_from(["bf16", "int8", "topk", ""]),
    st.sampled_from(["float64", "float32", "float16", "bfloat16", "bool"]),
    shapes,
    st.booleans(),
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.complex64])
parts = st.builds(
    lambda shape, dtype, spread: torch.ones((1,) * len(shape) if spread else shape, dtype=dtype).expand(shape),
    st.lists(st.sampled_from([0, 1, 2, 3, 16]), max_size=2),
    dtypes,
    st.booleans(),
)


@given(st.lists(codes, max_size=3), st.lists(parts, max_size=5))
@settings(max_examples=200, deadline=None)
def test_any_codes_are_expanded_within_the_limit_or_refused(found: list[Coded], tensors: list[Tensor]) -> None:
    try:
        made = expanded(found, tensors, 4096)
    except ProtocolError:
        return
    for code in found:
        tensor = made[code.place]
        assert (tuple(tensor.shape), str(tensor.dtype)) == (code.shape, f"torch.{code.dtype}")
        assert tensor.requires_grad is code.grad
    assert sum(made[code.place].nbytes for code in found) <= 4096


# Feedback.


@pytest.mark.parametrize("compression", [BFloat16(feedback=True), Int8(feedback=True), TopK(0.25, feedback=True)])
def test_feedback_adds_the_error_of_the_last_compression(compression: Compression) -> None:
    """Compared with the same computation, written out."""
    crossing = Crossing("bank", Edge(on_send=[], on_gradient=[compression]))
    plain = type(compression)(0.25) if isinstance(compression, TopK) else type(compression)()
    rest = torch.zeros(6, 4)
    whole, sent = torch.zeros(6, 4), torch.zeros(6, 4)
    for step in range(20):
        x = some(6, 4, seed=step)
        (found,), _ = crossing.gradients([x])
        expected = plain(x + rest)
        assert torch.equal(found, expected)
        rest = x + rest - expected
        whole, sent = whole + x, sent + found
    torch.testing.assert_close(whole - sent, rest)  # nothing is lost: the rest is only sent later


def test_feedback_is_kept_apart_by_shape_place_and_direction() -> None:
    crossing = Crossing("bank", Edge(on_send=[TopK(0.5, feedback=True)], on_gradient=[TopK(0.5, feedback=True)]))
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    crossing.values(None, [first, second])
    (again, once_more), _ = crossing.values(None, [torch.zeros(2), torch.zeros(2)])
    assert (again.tolist(), once_more.tolist()) == ([1.0, 0.0], [3.0, 0.0])
    (gradient,), _ = crossing.gradients([torch.zeros(2)])
    assert gradient.tolist() == [0.0, 0.0]
    (other,), _ = crossing.values(None, [torch.zeros(1, 2)])
    assert other.tolist() == [[0.0, 0.0]]


def test_feedback_is_bounded() -> None:
    kept = Feedback(limit=100)
    for number in range(50):
        kept.put(number, torch.zeros(10, dtype=torch.uint8))
        assert kept.nbytes <= 100
    assert kept.take(0) is None
    assert kept.take(49) is not None
    kept.put(1, torch.zeros(101, dtype=torch.uint8))  # too large to keep, but the others stay
    assert (kept.nbytes, kept.take(1)) == (90, None)
    kept.put(2, torch.zeros(10, dtype=torch.uint8))
    kept.clear()
    assert (kept.nbytes, kept.take(2)) == (0, None)


# Chains and edges.


def test_the_order_of_a_chain_counts() -> None:
    x = torch.tensor([[3.0, 4.0, 0.1, 0.1]])
    first = Crossing("bank", Edge(on_send=[], on_gradient=[Clip(1.0), TopK(0.5)]))
    then = Crossing("bank", Edge(on_send=[], on_gradient=[TopK(0.5), Clip(1.0)]))
    (clipped,), _ = first.gradients([x])
    (cut,), _ = then.gradients([x])
    assert torch.equal(clipped, TopK(0.5)(Clip(1.0)(x)))
    assert torch.equal(cut, Clip(1.0)(TopK(0.5)(x)))
    assert not torch.equal(clipped, cut)


def test_only_the_last_compression_travels_compressed() -> None:
    crossing = Crossing("bank", Edge(on_send=[TopK(0.5), BFloat16()], on_gradient=[]))
    x = some(8, 8)
    leaving = crossing.values(None, [x])
    (sent,), (code,) = leaving.wired(leaving.tensors)
    assert (sent.dtype, code.code) == (torch.bfloat16, "bf16")
    assert torch.equal(expanded([code], [sent], 1 << 20)[0], BFloat16()(TopK(0.5)(x)))


def test_a_chain_that_does_not_end_in_a_compression_travels_as_it_is() -> None:
    crossing = Crossing("bank", Edge(on_send=[BFloat16(), Clip(1.0)], on_gradient=[]))
    leaving = crossing.values(None, [some(4, 4)])
    sent, codes = leaving.wired(leaving.tensors)
    assert codes == ()
    assert torch.equal(sent[0], Clip(1.0)(BFloat16()(some(4, 4))))


def test_half_precision_is_clipped_in_single() -> None:
    """In half precision, rounding could make rows longer than the clip allows."""
    seen: list[torch.dtype] = []

    def look(tensor: Tensor) -> Tensor:
        seen.append(tensor.dtype)
        return tensor

    crossing = Crossing("bank", Edge(on_send=[Clip(1.0), look], on_gradient=[]))
    (found,), _ = crossing.values(None, [some(4, 4, dtype=torch.float16)])
    assert seen == [torch.float32]
    assert found.dtype is torch.float16


def test_a_function_of_one_s_own() -> None:
    crossing = Crossing("bank", Edge(on_send=[lambda x: 2 * x], on_gradient=[]))
    (found,), _ = crossing.values(None, [torch.ones(2)])
    assert found.tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x[:1], lambda x: x.double(), lambda x: None, lambda x: x.tolist()],
    ids=["shape", "dtype", "no", "list"],
)
def test_a_function_that_does_not_keep_the_shape_and_dtype(wrong: Any) -> None:
    crossing = Crossing("bank", Edge(on_send=[wrong], on_gradient=[]))
    with pytest.raises(MisuseError, match="must return a tensor of the same shape, dtype and device"):
        crossing.values(None, [torch.ones(2)])


def test_a_failing_transform_sends_nothing_and_hides_its_text(caplog: pytest.LogCaptureFixture) -> None:
    def fail(tensor: Tensor) -> Tensor:
        raise ValueError(f"{tensor.tolist()}")

    crossing = Crossing("bank", Edge(on_send=[fail], on_gradient=[]))
    with pytest.raises(MisuseError, match="on_send of the edge to 'bank' has failed with ValueError") as failure:
        crossing.values(None, [torch.full((1,), 0.125)])
    assert "0.125" not in str(failure.value)
    assert failure.value.__cause__ is None
    assert "0.125" in caplog.text


def test_releases_are_bounded() -> None:
    crossing = Crossing("bank", Edge(on_send=[], on_gradient=[Clip(1.0), GaussianNoise(1.0, releases=3)]))
    crossing.gradients([torch.ones(2), torch.ones(2)])
    crossing.gradients([torch.ones(2)])
    with pytest.raises(QuotaError, match="3 tensors were sent to 'bank' with noise"):
        crossing.gradients([torch.ones(2)])
    crossing.values(None, [torch.ones(2)])  # the other direction has its own limit


MISUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: Clip(0), "norm=0 must be a positive number"),
    (lambda: Clip(math.inf), "must be a positive number"),
    (lambda: Clip(1, per="column"), "must be 'row' or 'tensor'"),  # type: ignore[arg-type]
    (lambda: GaussianNoise(), "give a multiplier, for noise after a Clip, or std"),
    (lambda: GaussianNoise(1.0, std=1.0), "give a multiplier"),
    (lambda: GaussianNoise(-1.0), "multiplier=-1.0 must be a positive number"),
    (lambda: GaussianNoise(1.0, releases=0), "releases=0 must be a whole number"),
    (lambda: GaussianNoise(1.0)(torch.ones(1)), "give std to use it alone"),
    (lambda: TopK(0), "fraction=0 must be above 0"),
    (lambda: TopK(1.5), "must be above 0 and at most 1"),
    (lambda: Int8(feedback=1), "must be True or False"),  # type: ignore[arg-type]
    (lambda: Edge(on_send=[GaussianNoise(1.0)], on_gradient=[]), "put a Clip right before it"),
    (lambda: Edge(on_send=[], on_gradient=[Clip(1.0), BFloat16(), GaussianNoise(1.0)]), "on_gradient: .* a Clip right"),
    (
        lambda: Edge(on_send=[TopK(0.1, feedback=True), Clip(1.0), GaussianNoise(1.0)], on_gradient=[]),
        "after the noise",
    ),
    (lambda: Edge(on_send=Clip(1.0), on_gradient=[]), "must be a list of transforms"),  # type: ignore[arg-type]
    (lambda: Edge(on_send=[Clip], on_gradient=[]), "must be a list of transforms"),  # type: ignore[list-item]
    (lambda: Edge(on_send=None, on_gradient=[]), "must be a list of transforms"),  # type: ignore[arg-type]
    (lambda: Edge(on_send=[], on_gradient=[], passes=[int]), "passes: .* must be a list of torch dtypes"),
    (lambda: Edge(on_send=[], on_gradient=[], passes="float"), "passes: "),
]


@pytest.mark.parametrize(("attempt", "text"), MISUSED, ids=[text for _, text in MISUSED])
def test_misuse(attempt: Callable[[], Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        attempt()


def test_both_directions_have_to_be_given() -> None:
    with pytest.raises(TypeError, match="on_gradient"):
        Edge(on_send=[])  # type: ignore[call-arg]


def test_a_transform_without_a_call_raises() -> None:
    with pytest.raises(NotImplementedError):
        Transform()(torch.ones(1))


@pytest.mark.parametrize(
    ("name", "found"),
    [("bank", "bank"), ("bank-1", "bank-*"), ("bank-", "bank-*"), ("shop", "*"), ("a.b", "*"), ("x1y2z", "x*y*z")],
)
def test_the_edge_of_a_peer(name: str, found: str) -> None:
    edges = {each: Edge(on_send=[], on_gradient=[]) for each in ("x*y*z", "bank-*", "bank", "*")}
    assert edge_to(name, edges) is edges[found]


@pytest.mark.parametrize("name", ["shop", "bank[1]", "yz", "x*", "xyzz1"])
def test_a_peer_without_an_edge(name: str) -> None:
    edge = Edge(on_send=[], on_gradient=[])
    assert edge_to(name, {"bank*1": edge, "bank": edge, "xyz*z": edge}) is None


# Accounting.


@pytest.mark.parametrize(("multiplier", "times", "delta"), [(1.1, 100, 1e-5), (4.0, 1, 1e-6), (20.0, 3000, 1e-5)])
def test_epsilon_is_what_dp_accounting_says(multiplier: float, times: int, delta: float) -> None:
    library = pytest.importorskip(
        "dp_accounting", reason="dp-accounting is not installed: pip install backhaul[privacy]"
    )
    rdp = pytest.importorskip("dp_accounting.rdp")
    accountant = rdp.RdpAccountant()
    accountant.compose(library.GaussianDpEvent(multiplier), times)
    assert epsilon_of([Mechanism(multiplier, times)], delta) == accountant.get_epsilon(delta)
    accountant.compose(library.GaussianDpEvent(3.0), 7)
    both = [Mechanism(multiplier, times), Mechanism(1.0, 0), Mechanism(3.0, 7)]
    assert epsilon_of(both, delta) == accountant.get_epsilon(delta)


def test_epsilon_is_what_opacus_says_without_dp_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    opacus = pytest.importorskip("opacus.accountants", reason="Opacus is not installed", exc_type=ImportError)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    accountant = opacus.RDPAccountant()
    for _ in range(50):
        accountant.step(noise_multiplier=1.3, sample_rate=1.0)
    assert epsilon_of([Mechanism(1.3, 50)], 1e-5) == accountant.get_epsilon(1e-5)


def test_epsilon_needs_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dp_accounting", "opacus", "opacus.accountants"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MisuseError, match=r"pip install 'backhaul\[privacy\]'"):
        epsilon_of([Mechanism(1.0, 1)], 1e-5)
    assert epsilon_of([], 1e-5) == epsilon_of([Mechanism(1.0, 0)], 1e-5) == 0.0


def test_the_library_is_given_the_mechanisms_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments for dp-accounting, also where it is not installed."""
    composed: list[tuple[float, int]] = []

    class Accountant:
        def compose(self, event: float, count: int) -> None:
            composed.append((event, count))

        def get_epsilon(self, delta: float) -> float:
            return delta

    fake = types.ModuleType("dp_accounting")
    fake.GaussianDpEvent = float  # type: ignore[attr-defined]
    rdp = types.ModuleType("dp_accounting.rdp")
    rdp.RdpAccountant = Accountant  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dp_accounting", fake)
    monkeypatch.setitem(sys.modules, "dp_accounting.rdp", rdp)
    assert epsilon_of([Mechanism(1.5, 3), Mechanism(2.0, 1)], 1e-5) == 1e-5
    assert composed == [(1.5, 3), (2.0, 1)]


def test_parts_of_a_compressed_tensor_land_on_its_device() -> None:
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    codes = [Coded(1, "topk", "float32", (4,)), Coded(0, "bf16", "float32", (4,))]
    assert devices_of(codes, [first, second]) == [first, second, second]
    for place in (-1, 2):
        with pytest.raises(ProtocolError):
            devices_of([Coded(place, "topk", "float32", (4,))], [first, second])


def test_coded_describes_the_original_tensor() -> None:
    assert coded(2, Int8(), torch.zeros(3, 1, requires_grad=True)) == Coded(2, "int8", "float32", (3, 1), True)
