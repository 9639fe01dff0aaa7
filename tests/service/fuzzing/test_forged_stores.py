"""What a trainer of one root can forge there opens nothing else, and takes no server down.

`make fuzz` tries as many forgeries as there is time for, from a new seed: CAIRN_FUZZ_SECONDS says
how long, five minutes unless it is set.
"""

import itertools
import os
import random
import time
from collections import Counter, defaultdict

import pytest

from tests.faults.report import seed, tell
from tests.service.fuzzing.attacked import MIB, attack
from tests.service.fuzzing.by_hand import by_hand
from tests.service.fuzzing.forging import Place, documents, in_documents, in_files, kinds

SECONDS = float(os.environ.get("CAIRN_FUZZ_SECONDS", "300"))
JOBS = 0.1
"""Share of forgeries about which jobs are started, too; of those by hand it is about all."""


def by_place(forgeries):
    """Those of each place."""
    found = defaultdict(dict)
    for forgery in forgeries:
        found[forgery.base, forgery.document, forgery.field][forgery.value] = forgery
    return [Place([*values], values.__getitem__) for values in found.values()]


def drawn(places, chance):
    """All forgeries, place by place with any value, and again until there are no more."""
    places = [Place(chance.sample(one.values, len(one.values)), one.forgery) for one in places]
    chance.shuffle(places)
    for turn in itertools.count():
        left = [one for one in places if turn < len(one.values)]
        if not left:
            return
        yield from (one.forgery(one.values[turn]) for one in left)


def mixed(attacked, chance):
    """All forgeries, and whether jobs are started; of documents, which are the most, twice as many
    at a time."""
    runs = attacked.bases, attacked.abroad
    found = [*in_documents(*runs)]
    places = [
        by_place(by_hand(*runs)),
        by_place(in_files(*runs)),
        found[::2],
        found[1::2],
    ]
    for by_hands, *others in itertools.zip_longest(*(drawn(one, chance) for one in places)):
        if by_hands is not None:
            yield by_hands, True
        yield from ((one, chance.random() < JOBS) for one in others if one is not None)


@pytest.mark.timeout(SECONDS + 600)
def test_nothing_forged_in_a_root_leads_elsewhere_or_takes_the_server_down(tmp_path):
    chance, until = random.Random(seed()), time.monotonic() + SECONDS
    faults, tried, statuses, peak = defaultdict(list), Counter(), Counter(), 0
    with attack(tmp_path) as attacked:
        missing = kinds().keys() - {document.name for document in documents(attacked.bases)}
        assert not missing
        for forgery, jobs in mixed(attacked, chance):
            outcome = attacked.try_out(forgery, jobs=jobs)
            tried[forgery.document] += 1
            statuses += outcome.statuses
            peak = max(peak, outcome.peak)
            for kind, where in outcome.faults.items():
                faults[kind].append(f"{forgery} | {len(where)} x {where[0]}"[:600])
                tell(f"forged: {kind}: {faults[kind][-1]}")
            if time.monotonic() > until:
                break
    count = sum(map(len, faults.values()))
    tell(f"forged: {tried.total()} runs, {count} faults of {len(faults)} kinds")
    tell(f"forged: {dict(tried.most_common())}")
    tell(f"forged: answers {dict(statuses.most_common())}; at most {peak / MIB:.0f} MiB more")
    shown = [f"{kind}: {len(one)}\n  " + "\n  ".join(one[:20]) for kind, one in faults.items()]
    assert not faults, "\n".join(shown)
