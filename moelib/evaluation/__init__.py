"""Evaluation of trained models: multiple choice, perplexity and the tasks of lm-eval."""
