"""Random kills of every process under load, checked by the ledger."""
