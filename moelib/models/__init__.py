"""Whole models, their losses and their exact costs."""
