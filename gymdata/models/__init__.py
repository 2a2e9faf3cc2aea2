"""Models on this machine: found, identified, and run forward over saved token ids."""
