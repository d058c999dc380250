"""The Python API: `dora_rl.train`, `dora_rl.DoraConfig`, `dora_rl.Run`. Import its names from `dora_rl`."""
