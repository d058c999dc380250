"""Versioned weights: published atomically, verified by a fingerprint, held by leases, freed when no lease is left."""
