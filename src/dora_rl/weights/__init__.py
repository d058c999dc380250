"""Versioned weights: published atomically, proven by a fingerprint, held by leases, freed when nobody holds them."""
