"""What is worth keeping and who leaves. Pure; one file per policy."""
