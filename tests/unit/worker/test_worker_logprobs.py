"""Log-probabilities against log_softmax in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headrace.worker.sampling.logprobs import position_logprobs, slice_positions


@pytest.mark.parametrize("vocab", [7, 64, 10007])
def test_values_ranks_and_tops_equal_log_softmax(vocab):
    raw = torch.tensor(np.random.default_rng(1).normal(0, 4, (6, vocab)), dtype=torch.float32)
    ids = np.array([0, 1, 2, vocab - 1, int(raw[4].argmax()), int(raw[5].argmin())])
    counts = np.array([0, 1, 5, 3, 5, 100])
    exact = raw.double().log_softmax(1)
    for row, entry in enumerate(position_logprobs(raw, ids, counts)):
        order = torch.argsort(raw[row], descending=True, stable=True).tolist()
        assert entry.token_id == ids[row]
        assert entry.logprob == pytest.approx(float(exact[row, ids[row]]), abs=1e-6)
        assert entry.rank == order.index(int(ids[row])) + 1
        assert entry.top_ids == order[: min(counts[row], vocab)]
        assert entry.top_logprobs == pytest.approx(exact[row, entry.top_ids].tolist(), abs=1e-6)


def test_equal_logits_share_a_rank_and_stand_in_the_order_of_their_ids():
    raw = torch.zeros(1, 500)
    raw[0, [30, 400]] = 2.0
    entry = position_logprobs(raw, np.array([400]), np.array([4]))[0]
    assert entry.rank == 1
    assert entry.top_ids[:2] == [30, 400]


def test_a_row_is_bitwise_the_same_in_any_batch():
    raw = torch.tensor(np.random.default_rng(2).normal(0, 4, (9, 49152)), dtype=torch.float32)
    ids = np.arange(9)
    together = position_logprobs(raw, ids, np.full(9, 5))
    assert [position_logprobs(raw[r : r + 1], ids[r : r + 1], np.array([5]))[0] for r in range(9)] == together


def test_slices_stay_small():
    assert slice_positions(49152) == 256
    assert 1 <= slice_positions(151936) * 151936 * 4 <= 64 << 20
    assert slice_positions(10**9) == 1
