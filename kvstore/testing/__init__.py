"""Contract suites and fault rigs, shipped for people who add a tier, a policy or an engine."""
