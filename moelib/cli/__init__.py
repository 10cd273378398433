"""The commands of `moelib`, one file each."""
