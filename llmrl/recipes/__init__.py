"""Recipes: configurations with recorded learning curves, and the comparison of other runs with these curves."""

from llmrl.recipes.band import Band, Curve, Verdict, band_of, judge
from llmrl.recipes.recipe import Recipe, Record, find_recipe, known_recipes
from llmrl.recipes.record import DIFFERENCE, curves_of, log_prob_difference, record
from llmrl.recipes.run import train_seed

__all__ = [
    "DIFFERENCE",
    "Band",
    "Curve",
    "Recipe",
    "Record",
    "Verdict",
    "band_of",
    "curves_of",
    "find_recipe",
    "judge",
    "known_recipes",
    "log_prob_difference",
    "record",
    "train_seed",
]
