"""A whole Flower on this machine: `fedstrata run --engine flower`. Ray's actors are the clients.

Flower runs in a thread of this process. Its ServerApp does nothing but hand over the Grid, so that a simulation is an
engine like any other: the rounds, the run directory, resuming and Ctrl-C are those of every run.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Queue
from types import TracebackType

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedstrata.core.errors import FedstrataError, MissingExtra
from fedstrata.engines.flower.engine import FlowerEngine
from fedstrata.engines.local import available_workers
from fedstrata.nodes import client
from fedstrata.nodes.environment import DATA, MEMORY, RECIPE, SIMULATED
from fedstrata.recipes.experiment import Experiment

_START = 300.0
"""Seconds in which Ray and its actors must have started and loaded their data."""

_STOP = 10.0
"""Seconds in which they must have stopped."""


class FlowerSimulation:
    """A context manager: the engine, while Flower runs."""

    def __init__(self, experiment: Experiment, memory: Path | None = None) -> None:
        """What clients remember lies in the folder `memory`; if there is none, it ends with the simulation."""
        if find_spec("ray") is None:
            raise MissingExtra("ray", "flower", "a simulation with Flower")
        self._experiment, self._memory = experiment, memory
        self._grids: Queue[Grid] = Queue()
        self._over, self._problem = threading.Event(), ""
        self._thread = threading.Thread()
        self._stack = ExitStack()

    def __enter__(self) -> FlowerEngine:
        experiment = self._experiment
        with ExitStack() as starting:
            # Whoever could write here could have the actors run any function, as a recipe may name any. So the folder
            # has mode 0700, and Ray, which opens its own to everybody, gets one inside. Paths of sockets must be short.
            temporary = tempfile.TemporaryDirectory(prefix="fedstrata-", dir="/tmp", ignore_cleanup_errors=True)
            folder = Path(starting.enter_context(temporary))
            recipe = folder / "recipe.toml"
            recipe.write_text(experiment.recipe.to_toml(), encoding="utf-8")
            (folder / "ray").mkdir()
            starting.callback(_let_ray_read_the_environment)
            starting.enter_context(_environment(_variables(folder, recipe, experiment.data, self._memory)))
            _let_ray_read_the_environment()
            starting.enter_context(_quiet())
            self._thread = threading.Thread(target=self._run, args=(folder / "ray",), name="flower", daemon=True)
            self._thread.start()
            starting.callback(self._stop)
            engine = FlowerEngine(
                self._grid(),
                experiment.setup,
                experiment.agreement,
                len(experiment.task.clients),
                timeout=experiment.recipe.engine.timeout,
                poll=0.02,
                simulated=True,
                check=self._check,
            )
            engine.run = secrets.token_hex(8)  # whoever has a run directory says which run it is
            engine.wait_for(len(experiment.task.clients), _START)
            self._stack = starting.pop_all()
        return engine

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _grid(self) -> Grid:
        while True:
            try:
                return self._grids.get(timeout=0.2)
            except Empty:
                self._check()

    def _check(self) -> None:
        if not self._thread.is_alive():
            raise FedstrataError(f"Flower's simulation has ended: {self._problem or 'for no known reason'}")

    def _stop(self) -> None:
        self._over.set()
        self._thread.join(_STOP)
        if self._thread.is_alive():  # Flower waits for a client that still works; its reply is of no more use
            _kill_actors()
            self._thread.join(_STOP)

    def _run(self, ray_folder: Path) -> None:
        """The simulation's thread."""
        server = ServerApp()

        @server.main()
        def hand_over(grid: Grid, context: Context) -> None:
            self._grids.put(grid)
            self._over.wait()

        config = self._experiment.recipe.engine
        workers = min(config.workers or available_workers(), len(self._experiment.task.clients))
        gpus = 0.0 if config.device == "cpu" else 1.0 / workers
        try:
            run_simulation(
                server_app=server,
                client_app=client.app,
                num_supernodes=len(self._experiment.task.clients),
                backend_config={
                    "client_resources": {"num_cpus": 1, "num_gpus": gpus},
                    "init_args": {
                        "num_cpus": workers,
                        "include_dashboard": False,
                        "_node_ip_address": "127.0.0.1",
                        "_temp_dir": str(ray_folder),
                        "log_to_driver": False,
                        "logging_level": logging.ERROR,
                    },
                },
            )
        except BaseException as error:
            self._problem = " ".join(f"{type(error).__name__}: {error.__cause__ or error}".split())


def _kill_actors() -> None:
    """Whoever waits for one of them is told then; after `ray.shutdown` he would wait for ever, and our exit for him."""
    below = [os.getpid()]
    for process in below:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            with suppress(OSError):
                below += map(int, children.read_text().split())
    for process in below[1:]:
        with suppress(OSError):
            if Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::"):
                os.kill(process, signal.SIGKILL)


def _variables(folder: Path, recipe: Path, data: Path | None, memory: Path | None) -> dict[str, str]:
    variables = {
        RECIPE: str(recipe),
        MEMORY: str(folder / "memory" if memory is None else memory),
        SIMULATED: "1",
        "FLWR_HOME": str(folder),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_AUTH_MODE": "token",  # or every user of this machine could have Ray run code as us, through its ports
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or it warns
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),  # Ray's backend adds to it, for its actors
    }
    return variables | ({DATA: str(data.absolute())} if data is not None else {})


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that Ray starts, and put them back as they were."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _let_ray_read_the_environment() -> None:
    """Ray reads how it is to authenticate when it is imported, which may have been long ago, for something else."""
    if "ray" in sys.modules:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

        AuthenticationTokenLoader.instance().reset_cache()
        Config.initialize("")


@contextmanager
def _quiet() -> Iterator[None]:
    """Flower's log would run through the live table; what matters of it is in the replies."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
