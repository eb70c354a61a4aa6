"""The kernel with the widgets of Colab, for the tests that run notebooks."""

from __future__ import annotations

import os

import pytest

from tests.notebooks import colab_kernel
from tests.notebooks.colab_kernel import ColabKernel


@pytest.fixture(scope="session")
def colab_if_made() -> ColabKernel | None:
    return colab_kernel.find(os.environ)


@pytest.fixture(scope="session")
def colab(colab_if_made: ColabKernel | None) -> ColabKernel:
    """For tests that have nothing to do without it."""
    if colab_if_made is None:
        pytest.skip(colab_kernel.MISSING)
    return colab_if_made
