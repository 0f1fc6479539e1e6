--[[
llmlaunch at sbatch: says before the queue when a training does not fit the GPUs it asks for.

For administrators. Put this file beside slurm.conf on the machines where people submit, as cli_filter.lua, and set in
slurm.conf:

    CliFilterPlugins=lua

It asks `llmlaunch check` about the batch script, which is read and never executed. Where llmlaunch has no verdict,
because what decides the memory was not read, it says so and the job is submitted. It fails open: where llmlaunch is
missing, is slow, cannot read the script or finds no training in it, the job is submitted as if this file were not
there. Whoever sets LLMLAUNCH_CLI_FILTER=off is not asked. SLURM calls it in the person's own process, so it is help and
no policy that cannot be passed by.
]]

-- What a site changes.
local LLMLAUNCH = "llmlaunch"  -- or its full path
local SECONDS = 20             -- it is given up after so long
local REFUSE = false           -- true: what does not fit is not submitted; false: it is said, and submitted
-- The profile (its name below LLMLAUNCH_CLUSTERS, or its path) of each partition's nodes; "" is where sbatch names no
-- partition. Jobs of other partitions are not looked at.
local CLUSTERS = {
  -- gpu = "h100-80gb-x8", [""] = "h100-80gb-x8",
}

-- Exit codes of `llmlaunch check`
local UNSAFE = 3               -- nothing safe
local NO_VERDICT = 5           -- what decides the memory was not read

local function quoted(word)
  return "'" .. tostring(word):gsub("'", "'\\''") .. "'"
end

-- Values that the command line gives and the script may not: the number of nodes, and the script's own arguments.
local function arguments_of(options)
  local words = {}
  local nodes = tostring(options["nodes"] or ""):match("^(%d+)") -- "4" or "4-4"
  if nodes then
    words[#words + 1] = "--set SLURM_NNODES=" .. nodes .. " nodes=" .. nodes
  end
  for place = 2, #options.argv do
    words[#words + 1] = "--set " .. quoted((place - 1) .. "=" .. options.argv[place])
  end
  return table.concat(words, " ")
end

local function check(options)
  local script = options.argv[1]
  local cluster = CLUSTERS[options["partition"] or ""]
  if options.type ~= "sbatch" or not script or not cluster or os.getenv("LLMLAUNCH_CLI_FILTER") == "off" then
    return slurm.SUCCESS
  end
  local command = "timeout -k 1 " .. SECONDS .. " " .. quoted(LLMLAUNCH) .. " check " .. quoted(script) ..
    " --cluster " .. quoted(cluster) .. " " .. arguments_of(options) .. " 2>&1 >/dev/null </dev/null; echo $?"
  local pipe = io.popen(command, "r")
  if not pipe then
    return slurm.SUCCESS
  end
  local answer = pipe:read("*a") or ""
  pipe:close()
  local code = tonumber(answer:match("(%d+)%s*$"))
  local reason = answer:match("error: ([^\n]*)")
  if (code ~= UNSAFE and code ~= NO_VERDICT) or not reason then
    return slurm.SUCCESS
  end
  reason = reason:gsub("%%", "%%%%") -- the functions below take a format
  if code == NO_VERDICT then
    slurm.log_info("llmlaunch: " .. reason .. " (submitted)")
    return slurm.SUCCESS
  end
  if REFUSE then
    slurm.log_error("llmlaunch: " .. reason .. " (not submitted; LLMLAUNCH_CLI_FILTER=off submits it all the same)")
    return slurm.ERROR
  end
  slurm.log_info("llmlaunch: warning: " .. reason .. " (submitted all the same)")
  return slurm.SUCCESS
end

function slurm_cli_pre_submit(options, offset)
  local fine, answer = pcall(check, options)
  return fine and answer or slurm.SUCCESS
end

function slurm_cli_setup_defaults(options, early)
  return slurm.SUCCESS
end

function slurm_cli_post_submit(offset, job_id, step_id)
  return slurm.SUCCESS
end
