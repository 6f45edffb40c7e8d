"""One workload under several policies, live and in virtual time: one table out."""
