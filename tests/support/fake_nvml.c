/* A scripted stand-in for libnvidia-ml.so.1: the real nvidia-ml-py loads it unmodified, where there is no GPU.
 *
 *   cc -std=c11 -Wall -Wextra -Werror -O1 -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 \
 *      -o libnvidia-ml.so.1 fake_nvml.c -lpthread
 *   -DOLD_DRIVER leaves out what drivers before R510 lack: MemoryInfo_v2 and ComputeRunningProcesses_v3.
 *
 * Environment
 *   FAKE_NVML_SCENARIO  the scenario; read again at the first call after it changed, so a test is its script
 *   FAKE_NVML_CALLS     where "FUNCTION COUNT" lines are written when the scenario changed and at nvmlShutdown
 *
 * Scenario: one directive a line, '#' starts a comment. Amounts take K, M or G (1024-based).
 *   gpu [uuid=U] [name=N] [total=80G] [reserved=512M] [used=N] [accounting=0|1] [shifted=0|1]
 *       The next GPU. `used` is what processes hold beside the ones listed. `shifted`: the process list of the
 *       R535 betas, whose third struct grew without a new version. `ecc=N` uncorrectable errors, `pages=1` and
 *       `rows=1`: a repair waits for a reset, `broken=1`: a row could not be remapped. `util=N` percent, `power=N`
 *       watts, `drawn=N` watts that the energy counter grows by (default: power; `none`: there is no counter).
 *       `clock=N` MHz of the SMs (default 1980), `reasons=N` bits of what holds it down, `celsius=N` (default 60),
 *       `corrected=N` ECC errors.
 *       `mig=1`: in MIG mode; asked whole it refuses memory and processes, as of callers without privilege.
 *   slice GPU [uuid=U] [total=10G] [reserved=N] [used=N]
 *       A MIG device of it. For `proc`, `fail` and `slow` the first slice written is GPU 100, the next 101.
 *   proc GPU pid=N mem=N|na [peak=N] [start=N]
 *       A process on it; `peak` is what accounting says (default: mem), `start` its start there, in microseconds
 *       since 1970.
 *   fail FUNCTION|* code=N [gpu=I]
 *       That call (or every call on a device) returns this code.
 *   slow FUNCTION|* us=N
 *       That call (or every call) takes this long: latency, or a hang.
 *   spin FUNCTION|* us=N
 *       The same, at work all the while: latency that costs the caller CPU time.
 *
 * Struct layouts are those of nvml.h 13.4.92.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 16
#define MAX_SLICES 16
#define FIRST_SLICE 100
#define MAX_PROCESSES 64
#define MAX_RULES 64
#define MAX_FUNCTIONS 64

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    ARGUMENT_VERSION_MISMATCH = 25
};
#define NOT_AVAILABLE UINT64_MAX
#define MEMORY_V2 0x02000028u

typedef struct { uint64_t total, free, used; } memory_t;
typedef struct { unsigned version; uint64_t total, reserved, free, used; } memory_v2_t;
typedef struct { unsigned pid; uint64_t used; unsigned gpu_instance, compute_instance; } process_info_t;
typedef struct { process_info_t info; uint64_t protected_memory; } grown_process_info_t;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_info_t;
typedef struct {
    unsigned gpu_utilization, memory_utilization;
    uint64_t max_memory, time, start;
    unsigned running, unused[5];
} accounting_t;

_Static_assert(sizeof(memory_v2_t) == 40, "nvmlMemory_v2_t");
_Static_assert(sizeof(process_info_t) == 24, "nvmlProcessInfo_t");
_Static_assert(sizeof(grown_process_info_t) == 32, "nvmlProcessInfo_t of R535 betas");
_Static_assert(sizeof(pci_info_t) == 68, "nvmlPciInfo_t");
_Static_assert(sizeof(accounting_t) == 56, "nvmlAccountingStats_t");

typedef struct {
    int index;
    char uuid[80], name[96];
    uint64_t total, reserved, used, ecc;
    unsigned accounting, shifted, pages, rows, broken, mig, utilization, clock, celsius;
    unsigned long long reasons, corrected;
    double power, drawn; /* watts */
    int parent;
} gpu_t;
typedef struct { int gpu; unsigned pid; uint64_t memory, peak, start; } process_t;
typedef struct { char function[64]; int gpu, code, spins; long microseconds; } rule_t;

static struct {
    gpu_t gpus[MAX_GPUS], slices[MAX_SLICES];
    process_t processes[MAX_PROCESSES];
    rule_t rules[MAX_RULES];
    int gpu_count, slice_count, process_count, rule_count;
} scenario;
static double joules[MAX_GPUS], counted_at;
static struct { char function[64]; long count; } calls[MAX_FUNCTIONS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stat read_state;
static int initialized;

/* How often each function was called */

static void count_call(const char *function)
{
    for (int i = 0; i < MAX_FUNCTIONS; i++) {
        if (!*calls[i].function)
            snprintf(calls[i].function, sizeof calls[i].function, "%s", function);
        if (!strcmp(calls[i].function, function)) {
            calls[i].count++;
            return;
        }
    }
}

static void write_calls(void)
{
    const char *path = getenv("FAKE_NVML_CALLS");
    char fresh[4096];
    FILE *file;
    if (!path)
        return;
    snprintf(fresh, sizeof fresh, "%.4000s.new", path);
    file = fopen(fresh, "w");
    if (!file)
        return;
    for (int i = 0; i < MAX_FUNCTIONS && *calls[i].function; i++)
        fprintf(file, "%s %ld\n", calls[i].function, calls[i].count);
    fclose(file);
    rename(fresh, path);
}

/* The scenario file */

static uint64_t amount(const char *text)
{
    char *end;
    double value = strtod(text, &end);
    for (const char *unit = "KMG"; *end && *unit; unit++) {
        value *= 1024;
        if (*unit == *end)
            return (uint64_t)value;
    }
    return (uint64_t)value;
}

/* The value of `key` among the words of a directive, or NULL. */
static const char *value_of(char words[][256], int count, const char *key)
{
    size_t length = strlen(key);
    for (int i = 0; i < count; i++)
        if (!strncmp(words[i], key, length) && words[i][length] == '=')
            return words[i] + length + 1;
    return NULL;
}

static uint64_t amount_of(char words[][256], int count, const char *key, uint64_t otherwise)
{
    const char *text = value_of(words, count, key);
    return text ? amount(text) : otherwise;
}

static double seconds_now(clockid_t clock)
{
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void count_energy(void)
{
    double now = seconds_now(CLOCK_MONOTONIC);
    for (int i = 0; i < scenario.gpu_count && counted_at > 0; i++)
        joules[i] += (now - counted_at) * (scenario.gpus[i].drawn > 0 ? scenario.gpus[i].drawn : 0);
    counted_at = now;
}

static void read_gpu(char words[][256], int count)
{
    int index = scenario.gpu_count++;
    gpu_t *gpu = &scenario.gpus[index];
    const char *uuid = value_of(words, count, "uuid"), *name = value_of(words, count, "name"), *drawn;
    gpu->index = index;
    if (uuid)
        snprintf(gpu->uuid, sizeof gpu->uuid, "%.79s", uuid);
    else
        snprintf(gpu->uuid, sizeof gpu->uuid, "GPU-00000000-0000-0000-0000-%012d", index);
    snprintf(gpu->name, sizeof gpu->name, "%.95s", name ? name : "Fake-H100");
    gpu->total = amount_of(words, count, "total", 80ull << 30);
    gpu->reserved = amount_of(words, count, "reserved", 512ull << 20);
    gpu->used = amount_of(words, count, "used", 0);
    gpu->accounting = (unsigned)amount_of(words, count, "accounting", 0);
    gpu->shifted = (unsigned)amount_of(words, count, "shifted", 0);
    gpu->ecc = amount_of(words, count, "ecc", 0);
    gpu->pages = (unsigned)amount_of(words, count, "pages", 0);
    gpu->rows = (unsigned)amount_of(words, count, "rows", 0);
    gpu->broken = (unsigned)amount_of(words, count, "broken", 0);
    gpu->mig = (unsigned)amount_of(words, count, "mig", 0);
    gpu->utilization = (unsigned)amount_of(words, count, "util", 0);
    gpu->clock = (unsigned)amount_of(words, count, "clock", 1980);
    gpu->celsius = (unsigned)amount_of(words, count, "celsius", 60);
    gpu->reasons = amount_of(words, count, "reasons", 0);
    gpu->corrected = amount_of(words, count, "corrected", 0);
    gpu->power = (double)amount_of(words, count, "power", 0);
    drawn = value_of(words, count, "drawn");
    gpu->drawn = drawn && !strcmp(drawn, "none") ? -1 : (double)amount_of(words, count, "drawn", (uint64_t)gpu->power);
    gpu->parent = -1;
}

static void read_slice(char words[][256], int count)
{
    int index = scenario.slice_count++;
    gpu_t *slice = &scenario.slices[index];
    const char *uuid = value_of(words, count, "uuid");
    slice->index = FIRST_SLICE + index;
    slice->parent = atoi(words[1]);
    if (uuid)
        snprintf(slice->uuid, sizeof slice->uuid, "%.79s", uuid);
    else
        snprintf(slice->uuid, sizeof slice->uuid, "MIG-00000000-0000-0000-0000-%012d", index);
    snprintf(slice->name, sizeof slice->name, "Fake-H100 MIG 1g.10gb");
    slice->total = amount_of(words, count, "total", 10ull << 30);
    slice->reserved = amount_of(words, count, "reserved", 0);
    slice->used = amount_of(words, count, "used", 0);
}

static void read_process(char words[][256], int count)
{
    process_t *process = &scenario.processes[scenario.process_count++];
    const char *memory = value_of(words, count, "mem");
    process->gpu = atoi(words[1]);
    process->pid = (unsigned)amount_of(words, count, "pid", 0);
    process->memory = memory && !strcmp(memory, "na") ? NOT_AVAILABLE : amount(memory ? memory : "0");
    process->peak = amount_of(words, count, "peak", process->memory);
    process->start = amount_of(words, count, "start", 0);
}

static void read_rule(char words[][256], int count)
{
    rule_t *rule = &scenario.rules[scenario.rule_count++];
    snprintf(rule->function, sizeof rule->function, "%.63s", words[1]);
    rule->gpu = (int)amount_of(words, count, "gpu", 0) - (value_of(words, count, "gpu") == NULL);
    rule->code = (int)amount_of(words, count, "code", SUCCESS);
    rule->microseconds = (long)amount_of(words, count, "us", 0);
    rule->spins = !strcmp(words[0], "spin");
}

static void read_line(char *line)
{
    char words[24][256], *rest = NULL;
    int count = 0;
    line[strcspn(line, "#\n")] = 0;
    for (char *word = strtok_r(line, " \t", &rest); word && count < 24; word = strtok_r(NULL, " \t", &rest))
        snprintf(words[count++], sizeof words[0], "%.255s", word);
    if (count && !strcmp(words[0], "gpu") && scenario.gpu_count < MAX_GPUS)
        read_gpu(words, count);
    else if (count > 1 && !strcmp(words[0], "slice") && scenario.slice_count < MAX_SLICES)
        read_slice(words, count);
    else if (count > 1 && !strcmp(words[0], "proc") && scenario.process_count < MAX_PROCESSES)
        read_process(words, count);
    else if (count > 1 && scenario.rule_count < MAX_RULES &&
             (!strcmp(words[0], "fail") || !strcmp(words[0], "slow") || !strcmp(words[0], "spin")))
        read_rule(words, count);
    else if (count) {
        fprintf(stderr, "fake_nvml: cannot read '%s ...'\n", words[0]);
        abort();
    }
}

static void read_scenario(void)
{
    const char *path = getenv("FAKE_NVML_SCENARIO");
    struct stat now;
    char line[1024];
    FILE *file;
    if (!path || stat(path, &now))
        return;
    if (now.st_ino == read_state.st_ino && now.st_mtim.tv_sec == read_state.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == read_state.st_mtim.tv_nsec && now.st_size == read_state.st_size)
        return;
    file = fopen(path, "r");
    if (!file)
        return;
    count_energy();
    memset(&scenario, 0, sizeof scenario);
    while (fgets(line, sizeof line, file))
        read_line(line);
    fclose(file);
    read_state = now;
    write_calls();
}

/* What every call begins with */

static int applies(const rule_t *rule, const char *function, int gpu)
{
    int named = !strcmp(rule->function, function) || (!strcmp(rule->function, "*") && (gpu >= 0 || rule->microseconds));
    return named && (rule->gpu < 0 || rule->gpu == gpu);
}

/* Count, take as long as asked, fail as asked. Called and returns with the lock held; sleeps without it. */
static int begin(const char *function, int gpu)
{
    int code = SUCCESS;
    long wait = 0, work = 0;
    count_call(function);
    read_scenario();
    for (int i = 0; i < scenario.rule_count; i++)
        if (applies(&scenario.rules[i], function, gpu)) {
            *(scenario.rules[i].spins ? &work : &wait) += scenario.rules[i].microseconds;
            if (scenario.rules[i].code)
                code = scenario.rules[i].code;
        }
    if (wait) {
        pthread_mutex_unlock(&lock);
        usleep((useconds_t)wait);
        pthread_mutex_lock(&lock);
    }
    if (work) {
        double until = seconds_now(CLOCK_THREAD_CPUTIME_ID) + (double)work / 1e6;
        pthread_mutex_unlock(&lock);
        while (seconds_now(CLOCK_THREAD_CPUTIME_ID) < until)
            ;
        pthread_mutex_lock(&lock);
    }
    return code;
}

#define SYSTEM_CALL(body)                                                                                              \
    do {                                                                                                               \
        int code;                                                                                                      \
        pthread_mutex_lock(&lock);                                                                                     \
        code = initialized ? begin(__func__, -1) : UNINITIALIZED;                                                      \
        if (code == SUCCESS) {                                                                                         \
            body;                                                                                                      \
        }                                                                                                              \
        pthread_mutex_unlock(&lock);                                                                                   \
        return code;                                                                                                   \
    } while (0)

#define DEVICE_CALL(handle, body)                                                                                      \
    do {                                                                                                               \
        int code;                                                                                                      \
        gpu_t *gpu = handle;                                                                                           \
        pthread_mutex_lock(&lock);                                                                                     \
        code = !initialized ? UNINITIALIZED : gpu ? begin(__func__, gpu->index) : INVALID_ARGUMENT;                    \
        if (code == SUCCESS) {                                                                                         \
            body;                                                                                                      \
        }                                                                                                              \
        pthread_mutex_unlock(&lock);                                                                                   \
        return code;                                                                                                   \
    } while (0)

/* The library */

EXPORT int nvmlInitWithFlags(unsigned flags)
{
    int code;
    (void)flags;
    pthread_mutex_lock(&lock);
    code = begin("nvmlInit", -1);
    initialized = code == SUCCESS;
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int nvmlShutdown(void)
{
    pthread_mutex_lock(&lock);
    write_calls();
    initialized = 0;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(int code)
{
    return code == SUCCESS ? "Success" : "as the scenario says";
}

EXPORT int nvmlSystemGetDriverVersion(char *text, unsigned size)
{
    SYSTEM_CALL(snprintf(text, size, "580.65.06"));
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count)
{
    SYSTEM_CALL(*count = (unsigned)scenario.gpu_count);
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    int code;
    pthread_mutex_lock(&lock);
    code = !initialized ? UNINITIALIZED : begin(__func__, (int)index);
    if (code == SUCCESS && (int)index >= scenario.gpu_count)
        code = INVALID_ARGUMENT;
    if (code == SUCCESS)
        *handle = &scenario.gpus[index];
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int nvmlDeviceGetUUID(void *handle, char *text, unsigned size)
{
    DEVICE_CALL(handle, snprintf(text, size, "%s", gpu->uuid));
}

EXPORT int nvmlDeviceGetName(void *handle, char *text, unsigned size)
{
    DEVICE_CALL(handle, snprintf(text, size, "%s", gpu->name));
}

EXPORT int nvmlDeviceGetPciInfo_v3(void *handle, pci_info_t *pci)
{
    DEVICE_CALL(handle, {
        memset(pci, 0, sizeof *pci);
        pci->bus = 16u + (unsigned)gpu->index;
        snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
    });
}

/* MIG */

EXPORT int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    DEVICE_CALL(handle, {
        *current = *pending = gpu->mig;
        code = gpu->parent < 0 ? SUCCESS : INVALID_ARGUMENT;
    });
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count)
{
    DEVICE_CALL(handle, *count = gpu->mig ? 7 : 0);
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **slice)
{
    DEVICE_CALL(handle, {
        unsigned place = 0;
        code = NOT_FOUND;
        for (int i = 0; i < scenario.slice_count; i++)
            if (scenario.slices[i].parent == gpu->index && place++ == index) {
                *slice = &scenario.slices[i];
                code = SUCCESS;
            }
    });
}

/* Load and power */

EXPORT int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates)
{
    DEVICE_CALL(handle, {
        rates[0] = rates[1] = gpu->utilization;
        code = gpu->mig || gpu->parent >= 0 ? NOT_SUPPORTED : SUCCESS;
    });
}

EXPORT int nvmlDeviceGetClockInfo(void *handle, int kind, unsigned *megahertz)
{
    DEVICE_CALL(handle, {
        *megahertz = gpu->clock;
        code = kind == 1 && gpu->parent < 0 ? SUCCESS : NOT_SUPPORTED;
    });
}

EXPORT int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius)
{
    DEVICE_CALL(handle, {
        *celsius = gpu->celsius;
        code = sensor == 0 && gpu->parent < 0 ? SUCCESS : NOT_SUPPORTED;
    });
}

#ifdef OLD_DRIVER
EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons)
#else
EXPORT int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons)
#endif
{
    DEVICE_CALL(handle, *reasons = gpu->reasons);
}

EXPORT int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts)
{
    DEVICE_CALL(handle, {
        *milliwatts = (unsigned)(gpu->power * 1000);
        code = gpu->parent >= 0 ? NOT_SUPPORTED : SUCCESS;
    });
}

EXPORT int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules)
{
    DEVICE_CALL(handle, {
        code = gpu->parent >= 0 || gpu->drawn < 0 ? NOT_SUPPORTED : SUCCESS;
        if (code == SUCCESS) {
            count_energy();
            *millijoules = (unsigned long long)(joules[gpu->index] * 1000);
        }
    });
}

/* Memory: version 1 counts the driver's reserve as used, version 2 apart */

static uint64_t held(const gpu_t *gpu)
{
    uint64_t sum = gpu->used;
    for (int i = 0; i < scenario.process_count; i++)
        if (scenario.processes[i].gpu == gpu->index && scenario.processes[i].memory != NOT_AVAILABLE)
            sum += scenario.processes[i].memory;
    return sum;
}

EXPORT int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory)
{
    DEVICE_CALL(handle, {
        code = gpu->mig ? NO_PERMISSION : SUCCESS;
        memory->total = gpu->total;
        memory->used = gpu->reserved + held(gpu);
        memory->free = gpu->total - memory->used;
    });
}

#ifndef OLD_DRIVER
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *memory)
{
    DEVICE_CALL(handle, {
        code = memory->version != MEMORY_V2 ? ARGUMENT_VERSION_MISMATCH : gpu->mig ? NO_PERMISSION : SUCCESS;
        memory->total = gpu->total;
        memory->reserved = gpu->reserved;
        memory->used = held(gpu);
        memory->free = gpu->total - gpu->reserved - memory->used;
    });
}
#endif

/* Processes: the list into `out`, `step` bytes apart; asked without room, only how many there are */

static int list_processes(const gpu_t *gpu, unsigned *count, char *out, size_t step)
{
    unsigned room = *count, found = 0;
    if (gpu->mig)
        return NO_PERMISSION;
    for (int i = 0; i < scenario.process_count; i++) {
        const process_t *process = &scenario.processes[i];
        if (process->gpu != gpu->index)
            continue;
        if (out && found < room) {
            grown_process_info_t grown = {{process->pid, process->memory, ~0u, ~0u}, 0};
            memcpy(out + found * step, &grown, step);
        }
        found++;
    }
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, process_info_t *out)
{
    DEVICE_CALL(handle, code = list_processes(gpu, count, (char *)out, sizeof *out));
}

#ifndef OLD_DRIVER
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, process_info_t *out)
{
    DEVICE_CALL(handle, {
        size_t step = gpu->shifted ? sizeof(grown_process_info_t) : sizeof *out;
        code = list_processes(gpu, count, (char *)out, step);
    });
}
#endif

/* Memory errors */

EXPORT int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, unsigned long long *count)
{
    DEVICE_CALL(handle, *count = counter != 0 ? 0 : kind == 1 ? gpu->ecc : gpu->corrected); /* 0: volatile */
}

EXPORT int nvmlDeviceGetRetiredPagesPendingStatus(void *handle, int *pending)
{
    DEVICE_CALL(handle, *pending = (int)gpu->pages);
}

EXPORT int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                                     unsigned *broken)
{
    DEVICE_CALL(handle, {
        *corrected = 0;
        *uncorrected = gpu->rows + gpu->broken;
        *pending = gpu->rows;
        *broken = gpu->broken;
    });
}

/* Accounting */

EXPORT int nvmlDeviceGetAccountingMode(void *handle, unsigned *mode)
{
    DEVICE_CALL(handle, *mode = gpu->accounting);
}

EXPORT int nvmlDeviceGetAccountingStats(void *handle, unsigned pid, accounting_t *stats)
{
    DEVICE_CALL(handle, {
        code = gpu->accounting && gpu->parent < 0 ? NOT_FOUND : NOT_SUPPORTED;
        for (int i = 0; gpu->accounting && i < scenario.process_count; i++)
            if (scenario.processes[i].gpu == gpu->index && scenario.processes[i].pid == pid) {
                memset(stats, 0, sizeof *stats);
                stats->max_memory = scenario.processes[i].peak;
                stats->start = scenario.processes[i].start;
                code = SUCCESS;
            }
    });
}
