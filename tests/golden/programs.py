"""What a program is: a value of each dimension. `programs.json` holds them, drawn once so that they cover all pairs of
values that can go together as evenly as may be; `COVERAGE.md` counts them."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

HERE = Path(__file__).parent
FILE = HERE / "programs.json"
COUNT, SEED, CANDIDATES = 200, 20261127, 60

FUSED = (
    "SGD",
    "SGD nesterov",
    "SGD weight_decay",
    "Adagrad",
    "Adagrad weight_decay",
    "RowWiseAdagrad",
    "RowMeanAdagrad",
    "SparseAdam",
    "SparseLion",
    "Adam",
    "AdamW weight_decay",
    "Adamax",
    "NAdam weight_decay",
    "RMSprop",
    "RMSprop centered",
)
FOLLOWED = (
    "follows SGD",
    "follows SGD nesterov",
    "follows Adagrad",
    "follows Adam",
    "follows Adam L2",
    "follows AdamW",
    "follows SparseAdam",
    "follows Adamax",
    "follows NAdam",
    "follows RMSprop",
)
ONE = "one process"

LEVELS: dict[str, tuple[str, ...]] = {
    "face": ("bag", "embedding", "collection", "rows collection", "converted", "ranks"),
    "tables": ("1", "3", "6"),
    "widths": ("one", "two", "three"),
    "modes": ("sum", "mean", "max", "all"),
    "capacity": ("1 row", "5 rows", "half", "all"),
    "tier": ("default", "host", "file"),
    "rows": ("float32", "bfloat16 nearest", "bfloat16 stochastic", "float16 nearest", "float16 stochastic"),
    "optimizer": FUSED + FOLLOWED,
    "schedule": ("constant", "decays"),
    "clipping": ("none", "norm 1"),
    "scaler": ("none", "finite", "one infinity"),
    "accumulation": ("1", "2"),
    "calls": ("once", "twice", "any order, some left out"),
    "bags": ("1 id", "0 to 5 ids", "0 to 200 ids", "mostly empty"),
    "weights": ("none", "constant", "with gradient"),
    "evaluation": ("none", "between"),
    "prefetch": ("0", "1", "2"),
    "step": ("eager", "captured"),
    "resume": ("none", "as it was", "of another capacity and tier"),
    "interrupt": ("none", "amid a step", "in the loader"),
    "ranks": ("1", "2", "3", ONE),
    "sharding": ("row-wise", "table-wise", "mixed", ONE),
    "max_ids": ("none", "given", ONE),
}


@dataclass(frozen=True)
class Program:
    """One of them: `number`, and a value of each dimension of `LEVELS`."""

    number: int
    face: str
    tables: str
    widths: str
    modes: str
    capacity: str
    tier: str
    rows: str
    optimizer: str
    schedule: str
    clipping: str
    scaler: str
    accumulation: str
    calls: str
    bags: str
    weights: str
    evaluation: str
    prefetch: str
    step: str
    resume: str
    interrupt: str
    ranks: str
    sharding: str
    max_ids: str

    @property
    def follows(self) -> bool:
        """Whether the tables follow a torch optimizer."""
        return self.optimizer in FOLLOWED

    @property
    def is_pooled(self) -> bool:
        return self.face not in ("embedding", "rows collection")

    @property
    def sizes_vary(self) -> bool:
        """Whether a step has other bags than the one before. Captured steps take batches of any lengths in ids, offsets
        and weights; of one length in all else."""
        return self.step == "eager" or (self.is_pooled and self.weights != "with gradient")

    @property
    def scores_are_timed(self) -> bool:
        """Whether scores depend on how far a thread that plans ahead has come: when its plans are given up, as after an
        interrupt, where a member is left out, and when a captured step starts to plan by itself, or when an evaluation
        takes its turn among them. Nothing else does."""
        gives_up = self.interrupt != "none" or self.calls == "any order, some left out" or self.step == "captured"
        return self.prefetch != "0" and (gives_up or self.evaluation != "none")

    @property
    def pairs(self) -> set[tuple[tuple[str, str], tuple[str, str]]]:
        """Of values of two dimensions, which it covers."""
        return set(itertools.combinations([(name, getattr(self, name)) for name in LEVELS], 2))

    def __str__(self) -> str:
        values = (f"{name}: {getattr(self, name)}" for name in LEVELS if getattr(self, name) != ONE)
        return f"program {self.number} · " + " · ".join(values)


Rule = Callable[[Program], bool]
CAPTURABLE = ("follows SGD", "follows Adam", "follows AdamW")
RULES: dict[str, Rule] = {
    "ranks, sharding and max_ids are of ranks": lambda p: (
        [value == ONE for value in (p.ranks, p.sharding, p.max_ids)] == [p.face != "ranks"] * 3
    ),
    "a bag and an embedding are one table": lambda p: (
        p.face not in ("bag", "embedding") or (p.tables, p.widths) == ("1", "one")
    ),
    "one table has one width, and one mode": lambda p: p.tables != "1" or (p.widths == "one" and p.modes != "all"),
    "rows that are not pooled have no mode": lambda p: p.is_pooled or (p.modes, p.weights) == ("sum", "none"),
    "a collection of rows has one width": lambda p: p.face != "rows collection" or p.widths == "one",
    "per-sample weights are of sums": lambda p: p.weights == "none" or p.modes == "sum",
    "sharded tables have no maxima here": lambda p: p.face != "ranks" or p.modes in ("sum", "mean"),
    "members of a converted model are called one by one": lambda p: (
        p.calls != "any order, some left out" or (p.face == "converted" and p.tables != "1")
    ),
    "a norm is clipped between backward and step": lambda p: p.clipping == "none" or p.follows,
    "a captured step is plain": lambda p: (
        p.step == "eager"
        or (
            (p.scaler, p.clipping, p.interrupt, p.accumulation) == ("none", "none", "none", "1")
            and p.calls != "any order, some left out"
            and p.face != "ranks"
            and p.tier != "file"
            and (not p.follows or p.optimizer in CAPTURABLE)
        )
    ),
    "ranks go on as long as all do": lambda p: p.face != "ranks" or p.interrupt == "none",
}


def allowed(program: Program) -> bool:
    return all(rule(program) for rule in RULES.values())


def draw() -> list[Program]:
    """All of them: each is that of some candidates which covers most pairs that none before does."""
    rng, covered, found = random.Random(SEED), Counter[object](), list[Program]()
    while len(found) < COUNT:
        candidates = list(itertools.islice(_candidates(rng, len(found)), CANDIDATES))
        best = max(candidates, key=lambda each: sum(1.0 / 4.0 ** covered[pair] for pair in each.pairs))
        covered.update(best.pairs)
        found.append(best)
    return found


def _candidates(rng: random.Random, number: int) -> Iterator[Program]:
    while True:
        program = Program(number, **{name: _choice(rng, values) for name, values in LEVELS.items()})
        if program.face != "ranks":
            program = Program(**asdict(program) | {"ranks": ONE, "sharding": ONE, "max_ids": ONE})
        if allowed(program):
            yield program


def _choice(rng: random.Random, values: tuple[str, ...]) -> str:
    return values[int(rng.random() * len(values))]


def save(programs: list[Program]) -> None:
    """One a line."""
    lines = ",\n".join(json.dumps(asdict(program)) for program in programs)
    FILE.write_text(f"[\n{lines}\n]\n")


def load() -> list[Program]:
    return [Program(**each) for each in json.loads(FILE.read_text())]


def coverage(programs: list[Program]) -> str:
    """Markdown: how many programs cover each value, and the pairs of values of two dimensions."""
    assert [field.name for field in fields(Program)] == ["number", *LEVELS]
    pairs = Counter(pair for program in programs for pair in program.pairs)
    lines = [
        "# What the golden programs cover",
        "",
        f"Written by `python -m tests.golden draw`. {len(programs)} programs; a pair is of values of two dimensions.",
        "",
        "| dimension | value | programs | other values it meets | meets each in at least |",
        "|---|---|---|---|---|",
    ]
    for name, values in LEVELS.items():
        for value in values:
            count = sum(getattr(program, name) == value for program in programs)
            met = Counter({pair: n for pair, n in pairs.items() if (name, value) in pair})
            lines.append(f"| {name} | {value} | {count} | {len(met)} | {min(met.values(), default=0)} |")
    possible = _possible(programs)
    never = sorted(" × ".join(f"{name}: {value}" for name, value in pair) for pair in possible - set(pairs))
    lines += [
        "",
        f"{len(pairs)} of the {len(possible)} pairs that can go together are covered. "
        + ("Not covered:" if never else "None is missing."),
        "",
        *(f"- {each}" for each in never),
    ]
    lines += [
        "",
        "## Pairs, by dimensions",
        "",
        "Covered pairs of the values of two dimensions, of those that can be.",
        "",
    ]
    names = list(LEVELS)
    lines += [f"| | {' | '.join(names)} |", f"|---{'|---' * len(names)}|"]
    for one in names:
        cells = []
        for other in names:
            of_both = [pair for pair in possible if {pair[0][0], pair[1][0]} == {one, other}]
            cells.append(f"{sum(pair in pairs for pair in of_both)}/{len(of_both)}" if of_both else "")
        lines.append(f"| {one} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _possible(programs: list[Program]) -> set[tuple[tuple[str, str], tuple[str, str]]]:
    """Pairs that some program can have: of many that are drawn at random."""
    rng, found = random.Random(0), set[tuple[tuple[str, str], tuple[str, str]]]()
    for program in itertools.islice(_candidates(rng, 0), 20_000):
        found |= program.pairs
    return found.union(*(program.pairs for program in programs))
