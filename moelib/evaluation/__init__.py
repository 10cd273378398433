"""Multiple choice, perplexity, and the tasks of lm-eval, for a trained model."""
