"""lightning-nereus: a Lightning strategy that changes a job's parallel plan while it runs."""
