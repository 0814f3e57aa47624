"""The doctor: rules that find faults in a run's records, each a pure function."""
