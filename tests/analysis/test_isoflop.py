"""The IsoFLOP analysis against the published grid, published optima, and exact parabolas."""

import numpy as np
import pytest

from experiments.flame_moe import MoESize, named_trainer_configs, published_parameters
from moelib.analysis.isoflop import fit_isoflop, fit_power_law, group_by_budget, isoflop_grid
from moelib.core.errors import UserError
from moelib.models.cost import model_cost

BUDGETS = (1e18, 3e18, 6e18, 1e19, 3e19)
TOKENS_PER_STEP = 2_097_152
# Width, layers: steps at each budget. Source: FLAME-MoE, scripts/ablation/search.sh.
PUBLISHED_GRID = {
    (256, 6): (2377, 7130, 14260, 23767, 71300),
    (256, 9): (2121, 6363, 12726, 21210, 63628),
    (512, 6): (967, 2900, 5799, 9664, 28992),
    (512, 9): (808, 2424, 4848, 8080, 24239),
    (512, 12): (695, 2083, 4165, 6942, 20825),
    (768, 6): (543, 1629, 3258, 5429, 16286),
    (768, 9): (436, 1306, 2611, 4351, 13052),
    (768, 12): (363, 1089, 2178, 3630, 10889),
    (1024, 12): (224, 672, 1344, 2240, 6718),
    (1024, 15): (190, 569, 1137, 1895, 5685),
    (1024, 18): (165, 493, 986, 1643, 4928),
    (1536, 12): (111, 331, 662, 1102, 3306),
    (1536, 15): (92, 276, 551, 918, 2752),
    (1536, 18): (79, 236, 472, 786, 2358),
    (2048, 15): (55, 163, 325, 541, 1621),
    (2048, 18): (46, 138, 276, 460, 1379),
}


def published_flops(width, layers):
    size = MoESize(layers, width, max_step=1, save_every=1, sequences_per_device=1)
    return 6 * published_parameters(size, num_experts=8)


def test_the_published_grid_has_the_steps_of_its_own_formula():
    sizes = {f"{w}x{layers}": published_flops(w, layers) for w, layers in PUBLISHED_GRID}
    grid = isoflop_grid(sizes, BUDGETS, tokens_per_step=TOKENS_PER_STEP)
    steps = {f"{w}x{layers}": steps for (w, layers), steps in PUBLISHED_GRID.items()}
    assert len(grid) == 80
    assert [run.steps for run in grid] == [steps[n][i] for i in range(5) for n in steps]
    assert grid[0].tokens == 2377 * TOKENS_PER_STEP


def test_a_grid_of_named_configs():
    # --8<-- [start:grid]
    flops = {}
    for name in ("38m-100m", "98m-349m"):
        cfg = named_trainer_configs()[f"flame-moe-{name}"]()
        flops[name] = model_cost(cfg.model.set(name="model").instantiate(parent=None), seq_len=2048)
    per_token = {name: cost.train_flops_per_token for name, cost in flops.items()}
    for run in isoflop_grid(per_token, [1e18, 3e18], tokens_per_step=1024 * 2048):
        print(f"flame-moe-{run.size}: --max_step={run.steps}")
    # --8<-- [end:grid]
    assert run.tokens * per_token["98m-349m"] == pytest.approx(3e18, rel=1e-3)


def test_the_published_optima_give_the_published_exponent():
    # The models that were chosen at four budgets, named by width and layers.
    optima = {1e18: (256, 9), 3e18: (512, 9), 6e18: (512, 12), 3e19: (1024, 15)}
    law = fit_power_law(list(optima), [published_flops(*size) / 6 for size in optima.values()])
    assert law.exponent == pytest.approx(0.69, abs=0.002)


@pytest.mark.parametrize(
    ("flops", "budgets", "tokens", "message"),
    [
        ({"small": 0.0}, [1e9], 8, "small=0.0"),
        ({"small": 1.0}, [-1.0], 8, "budgets has -1.0"),
        ({"small": 1.0}, [float("inf")], 8, "budgets has inf"),
        ({"small": 1.0}, [1e9], 0, "tokens_per_step=0"),
    ],
)
def test_sizes_of_a_grid_are_positive(flops, budgets, tokens, message):
    with pytest.raises(UserError, match=message):
        isoflop_grid(flops, budgets, tokens_per_step=tokens)


def parabolas(shift=0.0, noise=0.0, exponent=0.6):
    """Returns FLOPs, N and losses, with minima at 1e3 (C / 1e9)^exponent times exp(shift)."""
    rng = np.random.default_rng(0)
    flops, n, losses = [], [], []
    for budget in (1e9, 3e9, 1e10):
        best = 1e3 * (budget / 1e9) ** exponent
        for step in np.linspace(-1, 1, 7):
            flops.append(budget * (1 + 0.01 * step))
            n.append(best * np.exp(step))
            losses.append(2 + 0.1 * (step - shift) ** 2 + noise * rng.normal())
    return np.asarray(flops), np.asarray(n), np.asarray(losses)


def test_exact_parabolas_give_their_minima_and_law():
    fit = fit_isoflop(*parabolas())
    assert [p.num_runs for p in fit.parabolas] == [7, 7, 7]
    expected = [1e3, 1e3 * 3**0.6, 1e3 * 10**0.6]
    assert [p.parameters for p in fit.parabolas] == pytest.approx(expected, rel=1e-6)
    assert [p.loss for p in fit.parabolas] == pytest.approx([2, 2, 2])
    assert fit.law.exponent == pytest.approx(0.6, rel=1e-3)
    assert fit.law.interval == pytest.approx((0.6, 0.6), rel=1e-3)
    assert fit.law is not None
    assert fit.law(1e9) == pytest.approx(1e3, rel=1e-3)


def test_the_exponent_of_noisy_parabolas_is_inside_its_interval():
    fit = fit_isoflop(*parabolas(noise=0.003))
    low, high = fit.law.interval
    assert low < 0.6 < high
    assert 0.005 < high - low < 0.1


def test_bootstraps_without_a_minimum_are_counted():
    assert fit_isoflop(*parabolas(noise=0.003)).without_minimum == 0
    fit = fit_isoflop(*parabolas(noise=0.1))
    assert 0 < fit.without_minimum < 1


def test_minima_that_were_not_sampled_are_named_and_not_used():
    fit = fit_isoflop(*parabolas(shift=1.5))
    assert fit.law is None
    assert [p.parameters for p in fit.parabolas] == [None] * 3
    assert "above the largest size" in fit.parabolas[0].problem
    flops, n, losses = parabolas()
    assert "no minimum" in fit_isoflop(flops, n, -losses).parabolas[0].problem
    few = np.concatenate([np.arange(3), np.arange(7, 21)])
    fit = fit_isoflop(flops[few], n[few], losses[few])
    assert "3 sizes; a parabola requires 4" in fit.parabolas[0].problem
    assert fit.parabolas[0].coefficients is None
    assert fit.law.exponent == pytest.approx(0.6, rel=1e-3)


def test_budgets_are_groups_of_neighbors():
    groups = group_by_budget(np.asarray([3.0, 1.0, 3.2, 1.1]))
    assert [group.tolist() for group in groups] == [[1, 3], [0, 2]]


def test_budgets_too_close_to_tell_apart_are_named_and_not_used():
    """Neighbors of eight budgets 1.2 apart are of one budget, all of them are not."""
    flops, n, losses = parabolas()
    close = np.repeat(1e12 * 1.2 ** np.arange(8), 5)
    sizes, loss = np.tile(np.geomspace(1e5, 1e6, 5), 8), np.tile([2.1, 2.02, 2, 2.02, 2.1], 8)
    fit = fit_isoflop(np.r_[flops, close], np.r_[n, sizes], np.r_[losses, loss])
    assert "factor of 3.58" in fit.parabolas[-1].problem  # 1.2^7.
    assert [p.parameters is None for p in fit.parabolas] == [False, False, False, True]
    assert fit.law.exponent == pytest.approx(0.6, rel=1e-3)


def test_a_power_law_requires_two_budgets():
    with pytest.raises(UserError, match="2 minima at one budget"):
        fit_power_law([1e9, 1.1e9], [1e3, 1e3])
