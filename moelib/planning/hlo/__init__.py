"""Reader of compiled programs: HLO text, shapes and groups, and source locations."""
