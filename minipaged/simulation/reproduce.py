"""Run experiments on all cores.

Cases are independent and have separate seeds, so the results do not depend on the number of processes or on
which one runs which case.
"""

import logging
import signal
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_context
from typing import Any

from minipaged.components import Components
from minipaged.config import ConfigError
from minipaged.learn.apart import end_with_parent
from minipaged.learn.overrides import components_from
from minipaged.simulation.experiments import EXPERIMENTS
from minipaged.simulation.hardware import find
from minipaged.simulation.results import OWN, Case, Experiment, as_json
from minipaged.simulation.run import explained_hidden_fields
from minipaged.simulation.scripts import IDLE
from minipaged.simulation.systems import PAGED


def find_experiments(names: Sequence[str]) -> list[Experiment]:
    """Experiments by name, in the order of the page; `UnknownNameError` for an unknown name."""
    for name in names:
        find("experiment", EXPERIMENTS, name)
    return [experiment for name, experiment in EXPERIMENTS.items() if name in names]


def run_experiments(
    experiments: Sequence[Experiment],
    progress: Callable[[int, int], None],
    finished: Callable[[dict[str, Any]], None] = lambda result: None,
    use: Mapping[str, str] = OWN,
) -> list[dict[str, Any]]:
    """Run them and report (cases done, cases in all); one JSON-able dict each (see `results.as_json`).

    Each goes to `finished`, too, as soon as it and those before it are done. With `use`, the paged system
    has these classes; `ConfigError` for one that an experiment chooses itself.
    """
    simulated_components(use)  # (an error in one is reported before anything runs)
    for experiment in experiments:
        if taken := [name for name in use if name in experiment.chooses]:
            raise ConfigError(
                f"{experiment.name} chooses {taken[0]} itself; leave it or --use {taken[0]} out"
            )
    jobs: list[tuple[int, Hashable, Case]] = [
        (i, key, partial(run_with, use, case) if use else case)
        for i, experiment in enumerate(experiments)
        for key, case in experiment.cases.items()
    ]
    answers: list[dict[Hashable, Any]] = [{} for _ in experiments]
    results: list[dict[str, Any]] = []

    def note(number: int, answer: Any) -> None:
        i, key, _ = jobs[number]
        answers[i][key] = answer
        for experiment, known in list(zip(experiments, answers))[len(results) :]:
            if len(known) < len(experiment.cases):
                break
            results.append(as_json(experiment, {key: known[key] for key in experiment.cases}, use))
            finished(results[-1])

    run_cases([case for *_, case in jobs], progress, note)
    return results


def run_cases(
    cases: Sequence[Case],
    progress: Callable[[int, int], None],
    note: Callable[[int, Any], None] = lambda number, answer: None,
) -> list[Any]:
    """The results of independent cases, in order. Any exception ends the workers: nobody waits.

    `note` gets the number of each case and its result as soon as it is there.
    """
    others = set(active_children())
    progress(0, len(cases))
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_start) as pool:
        try:
            with _interrupts_stay_here():
                futures = [pool.submit(case) for case in cases]
            numbers = {future: number for number, future in enumerate(futures)}
            for done, future in enumerate(as_completed(futures), start=1):
                note(numbers[future], future.result())
                progress(done, len(cases))
        except BaseException:
            for worker in set(active_children()) - others:
                worker.kill()
            raise
    return [future.result() for future in futures]


def _start() -> None:
    quiet()
    end_with_parent()


@contextmanager
def _interrupts_stay_here() -> Iterator[None]:
    """Ctrl-C goes to all processes of a terminal; those started meanwhile leave it to this one."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def quiet() -> None:
    """Every preemption is a warning; here they are counted instead."""
    logging.getLogger("minipaged.scheduling").setLevel(logging.ERROR)


def simulated_components(use: Mapping[str, str]) -> Components:
    """The classes of `--use`; `ConfigError` for one that nothing calls here."""
    if idle := [name for name in use if name in IDLE]:
        raise ConfigError(f"--use {idle[0]} has no effect in a simulation; leave it out")
    return components_from(use)


def run_with(use: Mapping[str, str], case: Case) -> Any:
    """The result of a case in which the paged system has these classes, in a process of its own."""
    logging.getLogger("minipaged.learn").setLevel(logging.ERROR)
    PAGED.set(simulated_components(use))
    with explained_hidden_fields():
        return case()
