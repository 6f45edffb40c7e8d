"""Blocks of host memory: whole or nothing, and every one in one hand."""

from __future__ import annotations

import random

import pytest

from qlm_agent.engines.vllm.scheduler.kv_connector import HostBlocks


def test_an_owner_gets_all_that_it_needs_or_nothing() -> None:
    blocks = HostBlocks(5)
    assert blocks.take("a", 3)
    assert not blocks.take("b", 3)
    assert blocks.used == 3
    assert blocks.take("b", 2)
    blocks.give_back("a")
    blocks.give_back("a")
    blocks.give_back("nobody")
    assert (blocks.used, len(blocks.of("b"))) == (2, 2)
    with pytest.raises(AssertionError, match="owns blocks already"):
        blocks.take("b", 1)


def test_no_block_is_in_two_hands() -> None:
    dice, blocks, owners = random.Random(1), HostBlocks(40), set[str]()
    for number in range(2_000):
        if owners and dice.random() < 0.5:
            blocks.give_back(owner := dice.choice(sorted(owners)))
            owners.discard(owner)
        elif blocks.take(str(number), dice.randint(0, 9)):
            owners.add(str(number))
        held = [block for owner in owners for block in blocks.of(owner)]
        assert len(held) == len(set(held)) == blocks.used
        assert set(held) <= set(range(40))
