"""Mathematics: workloads, optima, strategies and certificates. No files, no printing."""
