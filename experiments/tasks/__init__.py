"""Tasks: models of many kinds in three functions each, trained end to end."""
