"""Stage 6: drives the stages before it. Configurations, recipes, the loop, checkpoints, evaluation."""
