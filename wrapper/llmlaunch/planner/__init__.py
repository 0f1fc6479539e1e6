"""From a recipe to a plan. Modules import only from those before them in this list:

`plan` (types), `setting` (what layouts are priced with), `search_space`, `points` (priced candidates), `legality`,
`bounds`, `incumbents`, `pricing`, `preference`, `stage_balance`, `stage_capacities`, `leading_layers`, `stage_search`,
`uneven_search`, `search`, `judge`, `sizing`, `what_if`, `planning`, `smallest_change`, `no_legal_layout`, `neighbours`,
`fallbacks`, `placement`.
Two are imported late, because only a failed plan needs them: `planning` imports `smallest_change` and `no_legal_layout`
inside functions.

Beside the floors below, the room imports sideways from `backends` (the search space, rules and facts of a framework)
and `calibration` (margins, corrections and rehearsals); neither imports the planner.
"""
