"""The step loop and what stands around it: intake, results, the offline and the async API."""
