"""Who is asking, and how much is open: authentication and the admitted requests. Later keys, quotas and admission."""
