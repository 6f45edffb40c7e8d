"""Papers' claims, measured on QLM's engines and deployers."""
