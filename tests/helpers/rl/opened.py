"""RL and populations in folders that they open themselves, as the commands do."""

import rl.run
from rl.population import evolution
from rl.population.population import check_population
from tests.helpers.parallel.opened import in_folder


def improve(build, run, config, console, **options):
    where = {name: options.pop(name) for name in ("resume", "mirror") if name in options}

    def begin(run):
        return rl.run.improve(build, run, config, console, **options)

    return in_folder(begin, run, console, **where)


def evolve(build, policy, run, config, population, console, **options):
    where = {name: options.pop(name) for name in ("resume", "mirror") if name in options}
    check_population(population, config)

    def begin(run):
        return evolution.evolve(build, policy, run, config, population, console, **options)

    return in_folder(begin, run, console, **where)
