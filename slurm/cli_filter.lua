--[[
llmlaunch at sbatch: warns before the queue of a training that does not fit the GPUs it asks for, or whose launch cannot
work.

For administrators: docs/cli-filter.md says how it is installed, what it says and what it costs. Put this file beside
slurm.conf on the machines where people submit, as cli_filter.lua, and set in slurm.conf:

    CliFilterPlugins=lua

It asks `llmlaunch check` about a batch script that may start a training; the script is read and never executed. If
anything fails, the job is submitted as if this file were not there. SLURM calls it in the person's own process, so it
helps people and enforces nothing: LLMLAUNCH_CLI_FILTER=off switches it off.
]]

-- What a site changes.
local LLMLAUNCH = "llmlaunch"  -- or its full path
local SECONDS = 20             -- it is given up after so long
local REFUSE = false           -- true: what does not fit or cannot start is not submitted; false: a warning
-- The profile (its name below LLMLAUNCH_CLUSTERS, or its path) of each partition's nodes; "" is where sbatch names no
-- partition. Jobs of other partitions are not looked at.
local CLUSTERS = {
  -- gpu = "h100-80gb-x8", [""] = "h100-80gb-x8",
}

-- Exit codes of `llmlaunch check`
local MISTAKE = 2              -- a launch that cannot work, or a script that it does not understand
local UNSAFE = 3               -- nothing safe
local NO_VERDICT = 5           -- what decides the memory was not read

-- Where neither a script nor the scripts that it names have any of these words, it starts no training that llmlaunch
-- knows, and llmlaunch is not asked. The words are parts of trainers' names and of their options.
local WORDS = {
  "train", "tune", "torchrun", "torch.distributed", "deepspeed", "accelerate", "megatron", "swift", "llama", "axolotl",
  "trl", "sft", "grpo", "rloo", "_dpo", "dpo_", " dpo", "/dpo", "_ppo", "ppo_", "/ppo", "kto", "orpo", "reward", "rlhf",
  "nemo", "verl/", "verl.", "slime", "nanotron", "olmo", "xtuner", "composer", "litgpt", "fabric", "lightning",
  "colossal", "deepy", "neox", "fsdp", "torchtitan", "run_recipe", "run_clm", "run_cpt", "run_script", "open_instruct",
  "setup_experiment", "/performance/", " ds ",
  "num-layers", "num_layers", "batch-size", "batch_size", "--lr", "learning-rate", "learning_rate", "epochs",
}
local SCRIPTS = { "%.sh$", "%.bash$", "%.sbatch$", "%.slurm$" }
local MOST_SCRIPTS = 20        -- of those that a script names; with more, llmlaunch is asked
-- Files that many scripts read and that start no program.
local STARTS_NOTHING = {
  "%S*conda%.sh", "%S*mamba%.sh", "%S*setvars%.sh", "%S*modules?%.sh", "%S*lmod%S*%.sh", "%S*/etc/profile%S*",
  "%S*%.bashrc", "%S*%.bash_profile", "%S*/init/bash",
}
local MOST_BYTES = 1024 * 1024 -- no launch script is larger

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

local function text_of(path)
  local file = io.open(path, "r")
  local text = file and file:read(MOST_BYTES)
  if file then
    file:close()
  end
  return text
end

-- Whether the commands of a script, or of scripts that it names, have one of the words above. Comments are left out, and
-- so are the lines of sbatch. A name with a variable may be any script.
local function may_train(path, seen)
  local text = text_of(path)
  if not text then
    return false
  end
  text = ("\n" .. text):gsub("\n[ \t]*#[^\n]*", "\n")
  local lower = text:lower()
  for _, word in ipairs(WORDS) do
    if lower:find(word, 1, true) then
      return true
    end
  end
  for _, pattern in ipairs(STARTS_NOTHING) do
    text = text:gsub(pattern, "")
  end
  local folder = path:match("^(.*/)") or ""
  for word in text:gmatch("[^%s;&|()<>\"'`=]+") do
    local name = word:gsub("^%./", "")
    for _, pattern in ipairs(SCRIPTS) do
      if name:find(pattern) then
        if name:find("$", 1, true) or seen.count >= MOST_SCRIPTS then
          return true
        end
        for _, place in ipairs({ name, folder .. name }) do
          if not seen[place] then
            seen[place], seen.count = true, seen.count + 1
            if may_train(place, seen) then
              return true
            end
          end
        end
      end
    end
  end
  return false
end

-- What `llmlaunch check` says of the script: its exit code, and the reason where there is one to be shown.
local function answer_of(script, cluster, options)
  local command = "timeout -k 1 " .. SECONDS .. " " .. quoted(LLMLAUNCH) .. " check " .. quoted(script) ..
    " --cluster " .. quoted(cluster) .. " " .. arguments_of(options) .. " 2>&1 </dev/null; echo $?"
  local pipe = io.popen(command, "r")
  if not pipe then
    return nil, nil
  end
  local answer = pipe:read("*a") or ""
  pipe:close()
  local code = tonumber(answer:match("(%d+)%s*$"))
  if code == MISTAKE then -- the lines after the first one are indented
    local launch = ("\n" .. answer):match("\nlaunch cannot work: (.-)\n[^ ]")
    return code, launch and ("the launch cannot work: " .. launch:gsub("%s*\n%s*", " "))
  end
  return code, (code == UNSAFE or code == NO_VERDICT) and answer:match("error: ([^\n]*)") or nil
end

local function check(options)
  local script = options.argv[1]
  local cluster = CLUSTERS[options["partition"] or ""]
  if options.type ~= "sbatch" or not script or not cluster or os.getenv("LLMLAUNCH_CLI_FILTER") == "off" or
    not may_train(script, { count = 0 }) then
    return slurm.SUCCESS
  end
  local code, reason = answer_of(script, cluster, options)
  if not reason then
    return slurm.SUCCESS
  end
  reason = reason:gsub("%%", "%%%%") -- the functions below take a format
  if code == NO_VERDICT then
    slurm.log_info("llmlaunch: warning: " .. reason .. " (submitted)")
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
