"""Student's t and the binomial, against numerical integration, exact sums and published tables."""

import math

import numpy as np
import pytest

from verifiers.results.distributions import beta_cdf, sign_test, t_cdf, t_quantile


@pytest.mark.parametrize("df", [1, 2, 3, 7.5, 30, 400])
@pytest.mark.parametrize("t", [-2.5, -0.3, 0.0, 0.7, 1.96, 6.0])
def test_the_cdf_of_t_is_the_integral_of_its_density(df, t):
    grid = np.linspace(0.0, abs(t), 20_001)
    log_scale = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
    density = np.exp(log_scale - (df + 1) / 2 * np.log1p(grid**2 / df))
    inner = np.trapezoid(density, grid)
    assert t_cdf(t, df) == pytest.approx(0.5 + math.copysign(inner, t), abs=1e-8)


@pytest.mark.parametrize(
    ("probability", "df", "quantile"),  # of the tables in every textbook
    [
        (0.975, 1, 12.7062),
        (0.975, 4, 2.7764),
        (0.975, 9, 2.2622),
        (0.95, 20, 1.7247),
        (0.995, 60, 2.6603),
    ],
)
def test_quantiles_of_t_are_those_of_the_tables(probability, df, quantile):
    assert t_quantile(probability, df) == pytest.approx(quantile, abs=5e-5)
    assert t_quantile(1 - probability, df) == pytest.approx(-quantile, abs=5e-5)
    assert t_cdf(t_quantile(probability, df), df) == pytest.approx(probability, abs=1e-10)


@pytest.mark.parametrize(
    ("won", "lost"), [(0, 0), (1, 0), (5, 0), (3, 3), (20, 7), (2, 61), (250, 300)]
)
def test_the_sign_test_is_the_sum_over_the_binomial(won, lost):
    n = won + lost
    tail = sum(math.comb(n, k) for k in range(min(won, lost) + 1)) / 2**n
    assert sign_test(won, lost) == pytest.approx(min(1.0, 2 * tail), rel=1e-9)


def test_the_incomplete_beta_function_at_its_ends_and_by_symmetry():
    assert (beta_cdf(0.0, 2, 3), beta_cdf(1.0, 2, 3)) == (0.0, 1.0)
    assert beta_cdf(0.3, 2, 5) == pytest.approx(1 - beta_cdf(0.7, 5, 2), abs=1e-14)
    assert beta_cdf(0.5, 1, 1) == pytest.approx(0.5)
