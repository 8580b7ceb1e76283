"""What tests of data sets need."""

from __future__ import annotations

import dataclasses

import pytest

from fedstrata.tasks import datasets
from tests.support.published import TEST, TRAIN


@pytest.fixture
def small_world(tmp_path, monkeypatch):
    """Every set has 20 + 10 images and no known digests; nothing outside tmp_path is read or written."""
    for name, published in datasets.PUBLISHED.items():
        small = dataclasses.replace(published, images={"train": TRAIN, "test": TEST}, digests={})
        monkeypatch.setitem(datasets.PUBLISHED, name, small)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)
