"""The recipes of the equivalence matrix: optimizer, precision, clipping, accumulation, number of optimizers."""

from __future__ import annotations

import itertools

from tests.equivalence.harness import Recipe

OPTIMIZERS: list[tuple[str, dict[str, object]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"momentum": 0.9, "dampening": 0.1, "foreach": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"momentum": 0.9, "fused": True}),
    ("Adam", {"weight_decay": 0.01}),
    ("Adam", {"amsgrad": True, "foreach": True}),
    ("Adam", {"maximize": True, "fused": True, "lr": 1e-5}),
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"weight_decay": 0.1, "foreach": True}),
    ("AdamW", {"weight_decay": 0.1, "fused": True}),
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True, "fused": True}),
    ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.01}),
    ("NAdam", {"foreach": True}),
    ("RAdam", {"weight_decay": 0.01}),
    ("RAdam", {"foreach": True}),
    ("Adamax", {}),
    ("Adamax", {"foreach": True}),
    ("Adadelta", {"lr": 0.5}),
    ("Adadelta", {"lr": 0.5, "foreach": True}),
    ("Adagrad", {"lr_decay": 0.01}),
    ("Adagrad", {"foreach": True}),
    ("Adagrad", {"fused": True}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("RMSprop", {"foreach": True}),
    ("ASGD", {"lambd": 1e-3}),
    ("ASGD", {"foreach": True}),
    ("Rprop", {}),
    ("Rprop", {"foreach": True}),
    ("Adafactor", {}),
    ("Adafactor", {"foreach": True}),
    ("Muon", {}),
]
PRECISIONS = ["fp32", "bf16-mixed", "16-mixed", "bf16-true", "64-true"]
CLIPS = ["none", "norm", "value"]
ACCUMULATIONS = [1, 3]
COUNTS = [1, 2]


def allowed(recipe: Recipe) -> bool:
    """Combinations that torch itself refuses, or does not repeat, are left out."""
    fused = bool(recipe.options.get("fused"))
    if recipe.optimizer == "Muon":
        return recipe.precision in ("fp32", "bf16-mixed")
    # The CPU kernel of fused SGD with momentum gives other bits on every call in 16 bits (torch 2.13).
    return not (recipe.optimizer == "SGD" and fused and recipe.precision == "bf16-true")


def full() -> list[Recipe]:
    """The whole product: minutes of work, run by ``make equivalence``."""
    product = itertools.product(OPTIMIZERS, PRECISIONS, CLIPS, ACCUMULATIONS, COUNTS)
    recipes = [
        Recipe(optimizer=name, options=dict(options), precision=p, clip=c, accumulate=a, optimizers=n)
        for (name, options), p, c, a, n in product
    ]
    return [recipe for recipe in recipes if allowed(recipe)]


def pairs() -> list[Recipe]:
    """A covering selection: every optimizer with every precision, and the other axes in turn."""
    chosen = []
    for i, (name, options) in enumerate(OPTIMIZERS):
        for j, precision in enumerate(PRECISIONS):
            k = i + j
            recipe = Recipe(
                optimizer=name,
                options=dict(options),
                precision=precision,
                clip=CLIPS[k % 3],
                accumulate=ACCUMULATIONS[k % 2],
                optimizers=COUNTS[(k // 2) % 2],
                zero_in_place=k % 5 == 4,
            )
            if allowed(recipe):
                chosen.append(recipe)
    return chosen
