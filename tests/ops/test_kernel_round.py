"""The two ends of a speculative round: lookup and accept, against their twins."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from emulate.harness import Guarded
from sampler_setup import Setup
from torch import Tensor

from tinydecode.ops import ref_round
from tinydecode.ops import round as kernels

DRAWS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "log_min_p": math.log(0.2)},
]


def state_of(length: int, remaining: int = 100, draws: int = 0, round_: int = 0) -> Tensor:
    return torch.tensor([round_, draws, 0, length, remaining, 0])


class Sides:
    """The same round for the kernel and for the twin."""

    def __init__(
        self, bench: Any, p: Tensor, q: Tensor | None, draft: list[int], **params: Any
    ) -> None:
        self.bench, self.p, self.q, self.k = bench, p, q, len(draft)
        self.draft = draft
        self.params = params

    def run(
        self, module: Any, state: Tensor, has_proposed: bool = False, is_best: bool = False
    ) -> dict[str, Any]:
        """What one accept leaves behind; `is_best`: the one that takes logits."""
        device = self.bench.device if module is kernels else torch.device("cpu")
        place = (lambda x: x.to(device)) if module is ref_round else self.bench.put
        setup = Setup(self.bench, 1, self.p.shape[1], dict(self.params))
        params = setup.state if module is kernels else setup.state.cpu()
        vocab = self.p.shape[1]
        draft_vocab = vocab if self.q is None else self.q.shape[1]

        def distributions(logits: Tensor) -> Tensor:
            rows, size = logits.shape
            out = module.workspace(rows, size, device)
            counts = torch.zeros(rows, size, dtype=torch.int32, device=device)
            bias = torch.zeros(size, device=device)
            module.distribution(place(logits), params, bias, counts, out)
            return out

        p = None if is_best else distributions(self.p)
        q = None
        if self.q is not None:
            q = torch.stack([distributions(row[None]).view(-1) for row in self.q])
            if module is ref_round:
                q = q.view(self.k, draft_vocab + 2)
        state = state.clone().to(device)
        length = int(state[ref_round.LENGTH])
        history = Guarded((length + 20,), torch.int32, device)
        history.tensor.fill_(7)
        following = torch.full((1,), 7, dtype=torch.int64, device=device)
        draft_input = torch.full((2,), -1, dtype=torch.int64, device=device)
        lens = torch.zeros(2, dtype=torch.int32, device=device)
        ring = torch.zeros(4, ref_round.RING_WORDS, dtype=torch.int64, device=device)
        draft = torch.tensor(self.draft, dtype=torch.int64, device=device)
        ends = (draft, history.tensor, following, lens[:1], lens[1:], draft_input, ring)
        how = {"draft_rows": 6, "has_proposed": has_proposed}
        if is_best:
            module.accept_best(params, state, place(self.p), *ends, **how)
        else:
            sizes = {"vocab_size": vocab, "draft_vocab_size": draft_vocab}
            module.accept(params, state, p, q, *ends, **sizes, **how)
        history.assert_guards()
        ring[:, 1] = 0  # the time
        results = (state, history.tensor, following, lens, draft_input, ring)
        names = ("state", "history", "following", "lens", "draft_input", "ring")
        return {name: x.cpu() for name, x in zip(names, results, strict=True)}

    def check(self, state: Tensor, has_proposed: bool = False) -> dict[str, Any]:
        mine = self.run(kernels, state, has_proposed)
        others = [self.run(ref_round, state, has_proposed)]
        if self.params.get("temperature", 1.0) == 0.0 and self.q is None:
            others.append(self.run(kernels, state, has_proposed, True))
            others.append(self.run(ref_round, state, has_proposed, True))
        for other in others:
            for name, x in other.items():
                assert torch.equal(mine[name], x), (name, mine[name], x)
        length = int(state[ref_round.LENGTH])
        text = mine["history"].tolist()[: int(mine["state"][ref_round.LENGTH])]
        if len(text) > length:
            assert mine["draft_input"].tolist() == [x if x < 6 else 0 for x in text[-2:]]
            assert int(mine["following"]) == text[-1]
        return mine


@pytest.mark.parametrize("params", DRAWS)
@pytest.mark.parametrize(("vocab", "k"), [(5, 1), (9, 4), (1025, 3), (3000, 15)])
@pytest.mark.parametrize("has_q", [False, True])
def test_accept_is_the_twins(
    bench: Any, params: dict[str, Any], vocab: int, k: int, has_q: bool
) -> None:
    torch.manual_seed(k)
    p = torch.randn(k + 1, vocab) * 2
    q = p[:k] + 0.5 * torch.randn(k, vocab) if has_q else None
    draft = p[:k].argmax(-1).tolist()  # likely to stand, so that every length occurs
    stands = set()
    for draws in range(6):
        bench.schedule(draws + 1)
        sides = Sides(bench, p, q, draft, **params)
        found = sides.check(state_of(9, draws=draws, round_=draws))
        stands.add(int(found["ring"][(draws + 1) % 4, 0]) >> 8 & 0xFF)
        assert found["lens"].tolist() == [found["state"][3] - 1, found["state"][3] - 2]
    assert stands == {k} if params["temperature"] == 0 else stands


@pytest.mark.parametrize(("vocab", "k"), [(5, 0), (9, 4), (1025, 3), (1028, 15), (140000, 1)])
def test_best_tokens_without_distributions(bench: Any, vocab: int, k: int) -> None:
    """Equal logits, a draft that falls anywhere, awkward values beside the best one."""
    torch.manual_seed(vocab)
    for fall in range(k + 1):
        p = torch.randint(-3, 4, (k + 1, vocab)).float()  # many equals
        p[:, vocab // 2] = -torch.inf
        p[:, 1] = -0.0
        if fall % 2:
            p -= 1e30
        draft = p[:k].argmax(-1).tolist()
        if fall < k:
            draft[fall] = vocab - 1 if draft[fall] == 0 else 0
        bench.schedule(fall + 1)
        found = Sides(bench, p, None, draft, temperature=0.0).check(state_of(9, draws=fall))
        assert int(found["ring"][1, 0]) >> 8 & 0xFF == fall


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.nan])
@pytest.mark.parametrize("vocab", [50, 1025])
def test_a_broken_row_matters_only_where_it_is_reached(
    bench: Any, value: float, vocab: int
) -> None:
    for row in range(4):
        p = torch.zeros(4, vocab)
        draft = [3, 4, 5]
        p[torch.arange(3), draft] = 30.0
        p[row, vocab - 1] = value
        draft[1] = 9  # falls, so that rows 2 and 3 are not looked at
        found = Sides(bench, p, None, draft, temperature=0.0).check(state_of(9))
        assert (int(found["ring"][1, 0]) >> 24 & 1) == (row < 2)
    p = torch.full((1, vocab), -math.inf)
    found = Sides(bench, p, None, [], temperature=0.0).check(state_of(9))
    assert int(found["ring"][1, 0]) >> 24 & 1


def test_draft_with_a_smaller_vocabulary(bench: Any) -> None:
    torch.manual_seed(1)
    p = torch.randn(4, 1500)
    for draws in range(4):
        Sides(bench, p, torch.randn(3, 1100), [5, 9, 1099]).check(state_of(4, draws=draws))


def test_ends(bench: Any) -> None:
    """Stop tokens, the last token asked for, a round after the end, and a short draft."""
    p = torch.full((5, 20), -30.0)
    draft = [3, 4, 5, 6]
    p[torch.arange(4), draft] = 30.0
    p[4, 7] = 30.0

    def made(state: Tensor, has_proposed: bool = False, **params: Any) -> tuple[list[int], int]:
        found = Sides(bench, p, None, draft, temperature=0.0, **params).check(state, has_proposed)
        length = int(state[3])
        return found["history"][length : int(found["state"][3])].tolist(), int(found["state"][2])

    assert made(state_of(9)) == ([3, 4, 5, 6, 7], 0)
    assert made(state_of(9), stops=[5]) == ([3, 4, 5], 1)
    assert made(state_of(9), stops=[7, 19]) == ([3, 4, 5, 6, 7], 1)
    for remaining in range(1, 6):
        expected = [3, 4, 5, 6, 7][:remaining]
        assert made(state_of(9, remaining)) == (expected, 1)
    short = state_of(9)
    short[ref_round.PROPOSED] = 2
    assert made(short, has_proposed=True) == ([3, 4, 5], 0)
    short[ref_round.PROPOSED] = 0
    assert made(short, has_proposed=True) == ([3], 0)
    over = state_of(9)
    over[ref_round.IS_DONE] = 1
    assert made(over) == ([], 1)


@pytest.mark.parametrize("row", [0, 2, 3])
def test_logits_that_nothing_can_be_drawn_from(bench: Any, row: int) -> None:
    p = torch.zeros(4, 50)
    draft = [3, 4, 5]
    p[torch.arange(3), draft] = 30.0
    p[row, 9] = math.nan
    for temperature in (0.0, 1.0):
        found = Sides(bench, p, None, draft, temperature=temperature).check(state_of(9))
        assert int(found["ring"][1, 0]) >> 24 & 1
        assert found["state"][ref_round.IS_DONE] == 1
        assert found["history"][9 : 9 + row].tolist() == draft[:row]


def test_equal_distributions_always_stand(bench: Any) -> None:
    p = torch.randn(4, 200)
    for draws in range(20):
        found = Sides(bench, p, p[:3].clone(), [1, 2, 3]).check(state_of(3, draws=draws))
        assert int(found["ring"][1, 0]) >> 8 & 0xFF == 3


@pytest.mark.parametrize("vocab", [3, 1024, 2600])
def test_draft_token_is_the_twins(bench: Any, vocab: int) -> None:
    logits = torch.randn(1, vocab) * 2
    tokens: dict[Any, list[int]] = {kernels: [], ref_round: []}
    for module, found in tokens.items():
        device = bench.device if module is kernels else torch.device("cpu")
        setup = Setup(bench, 1, vocab, {"top_p": 0.9})
        params = setup.state.to(device)
        out = module.workspace(1, vocab, device)
        counts = torch.zeros(1, vocab, dtype=torch.int32, device=device)
        bias = torch.zeros(vocab, device=device)
        module.distribution(logits.to(device), params, bias, counts, out)
        token = torch.full((1,), -1, dtype=torch.int64, device=device)
        for index in range(8):
            state = state_of(5, draws=index // 3).to(device)
            module.draft_token(params, state, out, token, index, vocab)
            found.append(int(token))
    assert tokens[kernels] == tokens[ref_round]
    assert vocab == 3 or len(set(tokens[kernels])) > 1


@pytest.mark.parametrize(
    ("length", "capacity"),
    [*((n, 3500) for n in (1, 2, 5, 40, 1024, 1025, 3500)), (1, 1), (8192, 8192), (3, 8193)]
    + [(n, 20000) for n in (40, 8192, 8193, 8200, 16385, 20000)],
)
@pytest.mark.parametrize("sizes", [(3, 1), (1, 1), (5, 2), (16, 4)])
def test_ngram_is_the_twins(bench: Any, length: int, capacity: int, sizes: tuple[int, int]) -> None:
    for symbols in (2, 7, 50):
        torch.manual_seed(length + symbols)
        text = torch.randint(0, symbols, (capacity,), dtype=torch.int32)
        results = []
        for module in (kernels, ref_round):
            device = bench.device if module is kernels else torch.device("cpu")
            state = state_of(length).to(device)
            draft = torch.full((8,), -1, dtype=torch.int64, device=device)
            module.ngram(text.to(device), state, draft, *sizes)
            results.append((draft.tolist(), state.tolist()))
        assert results[0] == results[1]


def test_checks(bench: Any) -> None:
    state = state_of(5).to(bench.device)
    history = torch.zeros(9, dtype=torch.int32, device=bench.device)
    draft = torch.zeros(3, dtype=torch.int64, device=bench.device)
    for sizes in ((0, 0), (2, 3), (17, 1)):
        with pytest.raises(ValueError, match="min_n"):
            kernels.ngram(history, state, draft, *sizes)
    with pytest.raises(ValueError, match="draft must be"):
        kernels.ngram(history, state, draft.expand(16, 3).reshape(-1), 3, 1)
    with pytest.raises(ValueError, match="history must be torch.int32"):
        kernels.ngram(history.long(), state, draft, 3, 1)
    with pytest.raises(ValueError, match="state must be"):
        kernels.ngram(history, state[:5], draft, 3, 1)
