"""The benchmark of the scheduler does what it says: all requests run, a share of them ends and arrives in each step."""

import statistics

from headrace.bench.scheduler import BLOCK_TOKENS, Cell, SchedulerOptions, calibrate, run

SMALL = SchedulerOptions(
    running=20, short_context_tokens=512, long_context_tokens=800, unique_tokens=32, output_tokens=5, steps=40
)


def test_a_steady_cell_only_decodes():
    samples = Cell(SMALL, 512, arrivals=False).run()
    assert samples.arrivals == [0] * SMALL.steps
    assert len(samples.wall) == len(samples.cpu) == SMALL.steps
    assert all(wall > 0 for wall in samples.wall)


def test_requests_arrive_as_others_end_and_find_the_beginning_in_the_cache():
    cell = Cell(SMALL, 512, arrivals=True)
    samples = cell.run()
    assert statistics.fmean(samples.arrivals) == SMALL.running / SMALL.output_tokens
    stats = cell._scheduler.stats()
    most_computed = SMALL.unique_tokens + BLOCK_TOKENS
    # All but the first of each document.
    assert stats.prefix_hit_tokens >= (stats.prefix_query_tokens - 8 * 512) * (512 - most_computed) / 512
    assert stats.preemptions == 0


def test_the_report_has_a_pair_of_cells_for_each_length():
    report = run(SMALL)
    assert [cell.context_tokens for cell in report.cells] == [512, 512, 800, 800]
    assert [cell.arrivals_per_step > 0 for cell in report.cells] == [False, True, False, True]
    assert all(cell.p50_us <= cell.p99_us and cell.plan_bytes > 0 for cell in report.cells)
    assert 0 < report.calibration_us < 1e6
    assert calibrate() > 0
