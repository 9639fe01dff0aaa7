"""No byte of a checkpoint can change unnoticed: not for a load, a reader or a verification.

Each trial damages one file of a stored step, asks all of them, and mends the file.
"""

import gc
from collections import Counter
from random import Random

import pytest

from cairn import EasyDeLState, Run, StorageError, make_optimizer, verify_step
from cairn.state.paths import named_leaves
from cairn.storage.arrays.ocdbt import is_data_file
from tests.faults import report
from tests.faults.flips import (
    LOADS,
    StepFiles,
    Stored,
    flips,
    growths,
    load_with_orbax,
    missed,
    overwrites,
    pairs_of_flips,
    removals,
    swaps,
    truncations,
    verify,
)
from tests.state.my_model import my_model
from tests.storage.states import raw

SHOWN = 20

pytestmark = pytest.mark.timeout(7200 if report.is_long() else 300)


@pytest.fixture(autouse=True)
def _settled():
    """Tasks that failed log themselves here, not inside whatever comes next."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Saved with small chunks and small data files, so that a small state has several of each."""
    made = Stored(tmp_path_factory.mktemp("flips") / "run")
    values = [path for path in made.files if is_data_file(made.name(path))]
    assert len(values) >= 8
    return made


def assert_sound(stored):
    assert verify(stored).ok
    for load in (*LOADS.values(), load_with_orbax):
        load(stored, Random(0))


def test_a_checkpoint_that_nobody_touched_passes_every_check(stored):
    assert_sound(stored)
    assert not verify(stored).extra


def test_files_of_others_beside_harm_nobody_and_are_listed(stored):
    names = ["model/d/" + "0" * 32, "model/b/" + "1" * 32, "notes.txt", "average/extra.json"]
    for name in names:
        (stored.folder / name).write_bytes(b"somebody else's")
    assert_sound(stored)
    assert set(verify(stored).extra) == set(names)
    for name in names:
        (stored.folder / name).unlink()


@pytest.mark.parametrize(
    ("damages", "short", "long"),
    [
        (flips, 12, 1200),
        (pairs_of_flips, 3, 200),
        (overwrites, 3, 300),
        (truncations, 4, 200),
        (growths, 3, 100),
        (removals, 4, 100),
        (swaps, 3, 100),
    ],
)
def test_every_damage_is_noticed_by_all_who_read(stored, damages, short, long):
    rng = Random(f"{report.seed()} {damages.__name__}")
    made = damages(stored, report.trials(short=short, long=long), rng)
    lost, misses = 0, Counter()
    for damage in made:
        found = missed(stored, damage, rng)
        lost += bool(found)
        for who, instead in found.items():
            misses[stored.kind(damage.path), who, instead.partition(":")[0]] += 1
            if misses.total() <= SHOWN:
                report.tell(f"faults: {damage.path} {damage.detail}: {who}: {instead[:300]}")
    report.record(
        fault=f"c {made[0].how}",
        store="file",
        trials=len(made),
        survived=len(made) - lost,
        lost=lost,
        note=f"in {len({damage.path for damage in made})} of {len(stored.files)} files",
    )
    assert not misses, misses


@pytest.fixture(scope="module")
def model_run(tmp_path_factory):
    """A run that `save_state` made, and its state."""
    tx, tx_init = make_optimizer("adamw", learning_rate=1e-2)
    state = my_model().shard_model().to_state(tx, tx_init=tx_init)
    run = tmp_path_factory.mktemp("model") / "run"
    state.save_state(str(run), step=1, verbose=False).wait()
    return run, state


def bits(state):
    return {named.path: raw(named.leaf) for named in named_leaves(state)}


def test_a_damaged_state_is_never_loaded(model_run):
    """Not with a wrong value: what no load reads may be damaged, and verify tells that it is."""
    run, state = model_run
    rng = Random(f"{report.seed()} states")
    stored = StepFiles(run, 1)
    places = [{"sharding_axis_dims": dims, "auto_shard_model": True} for dims in
              ((2, 4, 1, 1), (1, 2, 1, 1))]  # fmt: skip
    made = flips(stored, report.trials(short=3, long=150), rng)
    wrong = Counter()
    for damage in made:
        with damage.inflict():
            found = verify_step(Run.open(run), 1)
            try:
                loaded = EasyDeLState.load_state(str(run), **rng.choice(places), verbose=False)
            except StorageError:
                wrong[stored.kind(damage.path)] += found.loads
            else:
                same = bits(loaded.replace(step=state.step)) == bits(state)
                wrong[stored.kind(damage.path)] += not (same and found.loads)
            wrong[stored.kind(damage.path)] += found.ok
    lost = wrong.total()
    report.record(
        fault="c one flipped bit, load_state of a model",
        store="file",
        trials=len(made),
        survived=len(made) - lost,
        lost=lost,
    )
    assert not lost, +wrong
    found = EasyDeLState.load_state(str(run), **places[0], verbose=False)
    assert bits(found.replace(step=state.step)) == bits(state)
