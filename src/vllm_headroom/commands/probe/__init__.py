"""The probe inside vLLM: how it gets there, and what is asked of it."""
