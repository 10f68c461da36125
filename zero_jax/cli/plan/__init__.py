"""The commands `plan`, `memory` and `comms`: `request` reads their options, `commands` runs them."""
