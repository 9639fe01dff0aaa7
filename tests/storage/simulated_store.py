"""An object store in which a scheduler decides whose next call is served, and who dies at it.

Actors are threads that run the real code; every call to the store waits for its turn. One actor
moves at a time, so that a run is decided by the scheduler's choices alone and can be replayed.
"""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cairn import PreconditionFailedError, parse_uri
from cairn.storage.store.graves import GRAVE, may_be_grave
from cairn.storage.store.objects import Versioned


class Killed(BaseException):
    """The actor's process died: nothing that it does after this reaches the store."""


class ModelClock:
    def __init__(self):
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self):
        return self.now

    def pass_seconds(self, seconds):
        self.now += timedelta(seconds=seconds)


@dataclass(eq=False)
class Actor:
    """One process, or one of several calls that a process makes at once.

    Attributes:
        name: its name.
        body: what it does.
        at: the call that it waits to make; None while it runs or has ended.
        caller: who makes this call and others at once; None: nobody, it is a process.
        calls: how many calls it waits for, that it has made at once.
        woken: it has been chosen, and has yet to make the call that it was chosen for.
    """

    name: str
    body: Callable[[], None]
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    at: str | None = None
    killed: bool = False
    ended: bool = False
    error: BaseException | None = None
    caller: "Actor | None" = None
    calls: int = 0
    woken: bool = False

    @property
    def process(self):
        """The one that it belongs to, which dies as a whole."""
        return self if self.caller is None else self.caller.process

    @property
    def depth(self):
        """How many calls it is made within."""
        return 0 if self.caller is None else 1 + self.caller.depth

    def run(self):
        try:
            self.body()
        except Killed:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.at, self.ended = None, True

    def run_call(self):
        """As `run`, for whoever has made this call: it is told whatever ends it."""
        try:
            self.body()
        except BaseException as error:
            self.error = error
        finally:
            self.at, self.ended = None, True


class Scheduler:
    """Runs actors one call at a time: the same one, but where it is told to choose another move,
    and the next in line once that has ended.

    Args:
        switches: at the n-th move of all, the index of the move to make, modulo how many there are.
        clock: moved on by a choice of its own, if `pauses` are left.
        pause_seconds: how far.
        kills: how many actors may be killed.
        pauses: how often the clock may jump.
    """

    def __init__(self, switches, clock, *, pause_seconds, kills=1, pauses=1):
        self._switches = switches
        self._last = None
        self._clock = clock
        self._pause_seconds = pause_seconds
        self._kills = kills
        self._pauses = pauses
        self._current = threading.local()
        self._actors = ()
        self._begun = False
        self._back = threading.Semaphore(0)
        self.history = []

    def turn(self, call):
        """Wait until the calling actor may make `call`; at once outside of any actor."""
        actor = getattr(self._current, "actor", None)
        if actor is None:
            return
        if actor.process.killed:
            raise Killed
        if actor.woken:
            actor.woken = False
            self.history[-1] = f"{actor.name}: step at {call}"
            return
        actor.at = call
        self._yield(actor)
        actor.at = None
        if actor.process.killed:
            raise Killed

    @property
    def current(self):
        """The name of the calling actor; "" outside of any."""
        actor = getattr(self._current, "actor", None)
        return "" if actor is None else actor.name

    def gather(self, calls):
        """What the calls return; the store serves what each of them asks at any moment.

        Raises what the first of those that failed raised, once all have ended.
        """
        caller = getattr(self._current, "actor", None)
        if caller is None:
            return [call() for call in calls]
        results = [None] * len(calls)
        made = []
        for at, call in enumerate(calls):

            def body(at=at, call=call):
                results[at] = call()

            made.append(Actor(f"{caller.name}/{at}", body, caller=caller, woken=True))
        caller.calls = len(made)
        self._actors += made
        for one in made:
            threading.Thread(target=self._start_call, args=(one,), daemon=True).start()
        if self._begun:
            self._wake(self._choose())
        else:
            self._back.release()
        caller.go.acquire()
        if caller.process.killed:
            raise Killed
        caller.woken = True  # it was chosen for its next call
        for one in made:
            if one.error is not None:
                raise one.error
        return results

    def run(self, *actors):
        """Run until all actors have ended."""
        self._actors = list(actors)
        for actor in actors:  # to its first call, one after the other
            threading.Thread(target=self._start, args=(actor,), daemon=True).start()
            self._back.acquire()
        self._begun = True
        self._wake(self._choose())
        self._back.acquire()

    def _yield(self, actor):
        """Whoever makes a call decides whose is next: most often its own, and no thread waits."""
        if not self._begun:
            self._back.release()
        elif (chosen := self._choose()) is actor:
            return
        else:
            self._wake(chosen)
        actor.go.acquire()

    def _wake(self, actor):
        """Let it go on; None: all have ended, and `run` does."""
        (self._back if actor is None else actor.go).release()

    def _choose(self):
        """The actor that moves next; None if all have ended."""
        while alive := [one for one in self._actors if not one.ended and not one.calls]:
            moves = [(actor, "step") for actor in alive]
            if self._kills:
                moves += [(actor, "kill") for actor in alive]
            if self._pauses:
                moves.append((None, "pause"))
            chosen = self._switches.get(len(self.history))
            if chosen is not None:
                actor, move = moves[chosen % len(moves)]
            else:
                actor, move = self._next(self._actors, alive), "step"
            if actor is None:
                self._pauses -= 1
                self.history.append("time passes")
                self._clock.pass_seconds(self._pause_seconds)
                continue
            self._last = actor
            self.history.append(f"{actor.name}: {move} at {actor.at}")
            if move == "kill":
                self._kills -= 1
                actor.process.killed = True
            return actor
        return None

    def _next(self, actors, alive):
        """The same as before; once that has ended, or waits for calls, the next call of its
        process, as if they were made in turn; once that has ended, the one after it.
        """
        if self._last in alive:
            return self._last
        last = None if self._last is None else self._last.process
        at = actors.index(last) if last in actors else 0
        own = [actor for actor in alive if actor.process is last]
        own.sort(key=lambda one: one.depth, reverse=True)
        return next(one for one in (*own, *actors[at:], *actors) if one in alive)

    def _start(self, actor):
        self._current.actor = actor
        actor.run()
        self._wake(self._choose() if self._begun else None)

    def _start_call(self, actor):
        actor.go.acquire()
        self._current.actor = actor
        if actor.process.killed:
            actor.error, actor.ended = Killed(), True
        else:
            actor.run_call()
        self._actors.remove(actor)
        actor.caller.calls -= 1
        self._wake(self._choose())


class _NoMoves:
    """Serves every call at once."""

    def turn(self, call):
        pass

    def gather(self, calls):
        return [call() for call in calls]


class SimulatedStore:
    """What `ObjectStore` offers, in memory, one call at a time.

    It is a bucket that speaks S3: of conditional requests it has writes alone, so that a deletion
    leaves a grave, and a generation tells the bytes, not which write has brought them. Or it is a
    disk, which deletes under a condition.

    Attributes:
        is_bucket: which of the two it is.
        values: what is stored, by key.
        changed: told, after each change, its key and a store that has the same values, whose calls
            are no moves.
    """

    if_absent_holds = True
    is_bucket = True
    is_remote = False

    def __init__(self, scheduler, uri="memory://model/run"):
        self.uri = parse_uri(uri)
        self.values = {}
        self.changed = None
        self._stamp = 0
        self._parsed = {}
        self._scheduler = scheduler

    def copied(self, scheduler):
        """A store of its own that holds the same."""
        copy = SimulatedStore(scheduler)
        copy.is_bucket = self.is_bucket
        copy.uri, copy.values, copy._stamp = self.uri, dict(self.values), self._stamp
        copy._parsed = dict(self._parsed)
        return copy

    def read(self, key):
        self._scheduler.turn(f"read {key}")
        return self._shown(key)

    def _shown(self, key):
        """What readers see: a grave is nothing."""
        stored = self.values.get(key)
        return None if stored is None or stored.value == GRAVE else stored

    def parse_many(self, keys, parse):
        found = {}
        for key in keys:
            value = self.read(key)
            if value is not None:
                known = (key, value.generation, parse)
                if known not in self._parsed:  # kept by generation, as the real one does
                    self._parsed[known] = parse(value.value, self.uri / key)
                found[key] = self._parsed[known]
        return found

    def read_each(self, keys):
        return ((key, self.read(key)) for key in keys)

    def read_many(self, keys):
        return dict(self.read_each(keys))

    def existing(self, keys):
        return {key for key, stored in self.read_each(keys) if stored is not None}

    def gather(self, *calls):
        return self._scheduler.gather(calls)

    def write(self, key, value):
        self._scheduler.turn(f"write {key}")
        return self._put(key, value)

    def write_if(self, key, value, *, generation, same_is_success=False):
        self._scheduler.turn(f"write {key} if {'absent' if generation is None else 'unchanged'}")
        current = self.values.get(key)
        if generation is None and not self.if_absent_holds:
            return self._put(key, value)
        if (None if current is None else current.generation) == generation:
            return self._put(key, value)
        if current is not None and current.value == GRAVE:
            if generation is not None:
                current = None
            else:
                return self._write_over_grave(key, value, same_is_success)
        if same_is_success and current is not None and current.value == value:
            return current.generation
        raise PreconditionFailedError("changed by someone else", path=key, current=current)

    def _write_over_grave(self, key, value, same_is_success):
        """As the real one: it has been refused, looks why, and writes under the grave's stamp."""
        self._scheduler.turn(f"read why not {key}")
        grave = self.values.get(key)
        if grave is None or grave.value != GRAVE:
            return self.write_if(key, value, generation=None, same_is_success=same_is_success)
        self._scheduler.turn(f"write {key} over its grave")
        current = self.values.get(key)
        if current is not None and current.generation == grave.generation:
            return self._put(key, value)
        return self.write_if(key, value, generation=None, same_is_success=same_is_success)

    def delete(self, key):
        self._scheduler.turn(f"delete {key}")
        self._pop(key)

    def delete_if(self, key, *, generation):
        self._scheduler.turn(f"delete {key} if unchanged")
        current = self.values.get(key)
        if current is None or current.value == GRAVE:
            return
        if current.generation != generation:
            raise PreconditionFailedError("changed by someone else", path=key, current=current)
        if self.is_bucket and may_be_grave(key):
            self._put(key, GRAVE)
        else:
            self._pop(key)

    def sync(self, name):
        """It keeps what it shows."""

    def list(self, prefix=""):
        self._scheduler.turn(f"list {prefix}")
        names = [key for key in self.values if key.startswith(prefix)]
        return sorted(name for name in names if self._shown(name) is not None)

    def children(self, prefix):
        folder = f"{prefix.removesuffix('/')}/"
        return [key for key in self.list(folder) if "/" not in key[len(folder) :]]

    def folders(self, prefix):
        folder = f"{prefix.removesuffix('/')}/"
        below = {key[len(folder) :].partition("/") for key in self.list(folder)}
        return sorted({f"{folder}{name}" for name, slash, _ in below if slash})

    def entries(self, prefix):
        folder = f"{prefix.removesuffix('/')}/"
        keys = self.list(folder)
        below = [key[len(folder) :].partition("/") for key in keys]
        folders = sorted({f"{folder}{name}" for name, slash, _ in below if slash})
        return [f"{folder}{name}" for name, slash, _ in below if not slash], folders

    def _put(self, key, value):
        self._stamp += 1
        stamp = hashlib.sha256(value).hexdigest() if self.is_bucket else str(self._stamp)
        generation = stamp.encode()
        self.values[key] = Versioned(bytes(value), generation)
        self._tell(key)
        return generation

    def _pop(self, key):
        if self.values.pop(key, None) is not None:
            self._tell(key)

    def _tell(self, key):
        if self.changed is not None:
            still = SimulatedStore(_NoMoves())
            still.is_bucket = self.is_bucket
            still.uri, still.values, still._parsed = self.uri, self.values, self._parsed
            self.changed(key, still)
