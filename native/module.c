/* megatier._native: the only file that knows Python. Parses, drops the GIL, calls the core, translates the outcome.
 * The contract is megatier/_native.pyi. */
#include <Python.h>

#include "adamw.h"
#include "block_io.h"
#include "checksum.h"
#include "copy.h"
#include "isa.h"
#include "reduce.h"
#include "thread_pool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

_Atomic int isa_level;

#define THREADS_MAX 1024
#define QUEUE_DEPTH_MAX (1 << 20)
#define SIGNAL_CHECK_NS 100000000 /* a wait without end still notices Ctrl-C */

struct module_state {
    PyTypeObject *batch_type, *latch_type, *pool_type;
};

typedef struct {
    PyObject_HEAD
    struct batch *batch;
} BatchObject;

typedef struct {
    PyObject_HEAD
    struct pool *pool;
} PoolObject;

/* ---- arguments ---- */

static bool value_error(const char *message)
{
    PyErr_SetString(PyExc_ValueError, message);
    return false;
}

/* An "O&" converter: an address or a count, a whole number that is not negative. */
static int to_size(PyObject *number, void *target)
{
    Py_ssize_t value = PyNumber_AsSsize_t(number, PyExc_OverflowError);
    if (value == -1 && PyErr_Occurred())
        return 0;
    *(size_t *)target = (size_t)value;
    return value >= 0 || value_error("an address or count must not be negative");
}

static bool aligned(size_t address, size_t alignment)
{
    return address % alignment == 0 || value_error("an address is not aligned to its element type");
}

/* Parse every item of a sequence of tuples into a new array; the caller frees it. NULL with an exception on failure. */
static void *parse_segments(PyObject *sequence, size_t item_bytes, bool (*parse)(PyObject *tuple, void *item),
                            size_t *num_items)
{
    PyObject *items = PySequence_Tuple(sequence);
    if (!items)
        return NULL;
    Py_ssize_t count = PyTuple_Size(items);
    unsigned char *array = calloc((size_t)count + 1, item_bytes);
    bool ok = array || PyErr_NoMemory();
    for (Py_ssize_t i = 0; ok && i < count; i++) {
        PyObject *item = PyTuple_GetItem(items, i);
        ok = PyTuple_Check(item);
        if (!ok)
            PyErr_SetString(PyExc_TypeError, "a segment must be a tuple");
        ok = ok && parse(item, array + (size_t)i * item_bytes);
    }
    Py_DECREF(items);
    if (!ok) {
        free(array);
        return NULL;
    }
    *num_items = (size_t)count;
    return array;
}

static bool parse_io_segment(PyObject *tuple, void *item)
{
    struct io_segment *segment = item;
    size_t file_offset, address;
    if (!PyArg_ParseTuple(tuple, "iO&O&O&:segment", &segment->fd, to_size, &file_offset, to_size, &address, to_size,
                          &segment->num_bytes))
        return false;
    segment->file_offset = (int64_t)file_offset;
    segment->address = (unsigned char *)address;
    return true;
}

static bool parse_adamw_segment(PyObject *tuple, void *item)
{
    struct adamw_segment *segment = item;
    if (!PyArg_ParseTuple(tuple, "O&O&f:segment", to_size, &segment->start, to_size, &segment->stop, &segment->decay))
        return false;
    return segment->start <= segment->stop || value_error("a segment stops before it starts");
}

static bool check_io(const struct io_segment *segments, size_t num_segments, size_t checksums, size_t granule_bytes,
                     size_t request_bytes)
{
    if (!request_bytes)
        return value_error("request_bytes must be positive");
    if (!checksums)
        return true;
    if (!granule_bytes)
        return value_error("checksums need a positive granule_bytes");
    for (size_t i = 0; i + 1 < num_segments; i++)
        if (segments[i].num_bytes % granule_bytes)
            return value_error("every segment but the last must be a multiple of granule_bytes");
    return aligned(checksums, sizeof(uint32_t));
}

/* ---- Batch ---- */

static PyObject *batch_object_wait(PyObject *self, PyObject *args, PyObject *kwargs)
{
    struct batch *batch = ((BatchObject *)self)->batch;
    double timeout_s = -1.0;
    static char *names[] = {"timeout_s", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|d:wait", names, &timeout_s))
        return NULL;
    bool for_ever = !(timeout_s >= 0 && timeout_s < 1e9), done = batch_wait(batch, 0);
    int64_t now_ns = monotonic_ns(), end_ns = for_ever ? INT64_MAX : now_ns + (int64_t)(timeout_s * 1e9);
    while (!done && now_ns < end_ns) {
        int64_t slice_ns = end_ns - now_ns < SIGNAL_CHECK_NS ? end_ns - now_ns : SIGNAL_CHECK_NS;
        Py_BEGIN_ALLOW_THREADS
        done = batch_wait(batch, slice_ns);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals())
            return NULL;
        now_ns = monotonic_ns();
    }
    return PyBool_FromLong(done);
}

static PyObject *batch_object_done(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(batch_wait(((BatchObject *)self)->batch, 0));
}

static PyObject *batch_object_span_ns(PyObject *self, PyObject *unused)
{
    (void)unused;
    int64_t start_ns, end_ns;
    batch_span(((BatchObject *)self)->batch, &start_ns, &end_ns);
    return Py_BuildValue("LL", (long long)start_ns, (long long)end_ns);
}

static PyObject *batch_object_error(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct failure failure;
    if (!batch_failure(((BatchObject *)self)->batch, &failure))
        Py_RETURN_NONE;
    return Py_BuildValue("sinLKK", failure.what, failure.code, (Py_ssize_t)failure.segment,
                         (long long)failure.file_offset, (unsigned long long)failure.expected,
                         (unsigned long long)failure.found);
}

static void batch_object_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    batch_release(((BatchObject *)self)->batch);
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef batch_methods[] = {
    {"wait", (PyCFunction)(void (*)(void))batch_object_wait, METH_VARARGS | METH_KEYWORDS,
     "wait($self, timeout_s=-1.0)\n--\n\n"
     "Block, GIL free, until all requests ended (True) or the time is over (False)."},
    {"done", batch_object_done, METH_NOARGS, "done($self)\n--\n\nTrue once all requests ended."},
    {"span_ns", batch_object_span_ns, METH_NOARGS,
     "span_ns($self)\n--\n\nCLOCK_MONOTONIC nanoseconds of the first request's start and the last one's end."},
    {"error", batch_object_error, METH_NOARGS,
     "error($self)\n--\n\nNone, or the first failure as (what, errno, segment, file_offset, expected, found)."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot batch_slots[] = {
    {Py_tp_doc, "One submitted operation, split into requests that several threads work on."},
    {Py_tp_methods, batch_methods},
    {Py_tp_dealloc, batch_object_dealloc},
    {0, NULL},
};
static PyType_Spec batch_spec = {
    .name = "megatier._native.Batch",
    .basicsize = sizeof(BatchObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = batch_slots,
};

/* ---- Latch: a batch of one request, which ends by hand ---- */

static PyObject *latch_object_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Latch", names))
        return NULL;
    struct batch *batch = batch_new(1, 0, NULL);
    if (!batch)
        return PyErr_NoMemory();
    BatchObject *self = PyObject_New(BatchObject, type);
    if (self)
        self->batch = batch;
    else
        batch_release(batch);
    return (PyObject *)self;
}

static PyObject *latch_object_set(PyObject *self, PyObject *unused)
{
    (void)unused;
    batch_end(((BatchObject *)self)->batch);
    Py_RETURN_NONE;
}

static PyMethodDef latch_methods[] = {
    {"set", latch_object_set, METH_NOARGS, "set($self)\n--\n\nLet everyone pass who waits, from now on. Again: no effect."},
    {"wait", (PyCFunction)(void (*)(void))batch_object_wait, METH_VARARGS | METH_KEYWORDS,
     "wait($self, timeout_s=-1.0)\n--\n\nBlock, GIL free, until it is set (True) or the time is over (False)."},
    {"is_set", batch_object_done, METH_NOARGS, "is_set($self)\n--\n\nTrue once it is set."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot latch_slots[] = {
    {Py_tp_doc, "An event that is set once. An interrupt in any thread leaves it whole."},
    {Py_tp_new, latch_object_new},
    {Py_tp_methods, latch_methods},
    {Py_tp_dealloc, batch_object_dealloc},
    {0, NULL},
};
static PyType_Spec latch_spec = {
    .name = "megatier._native.Latch",
    .basicsize = sizeof(BatchObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = latch_slots,
};

/* ---- ThreadPool ---- */

static PyObject *pool_object_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    size_t num_threads, queue_depth_max;
    static char *names[] = {"num_threads", "queue_depth_max", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:ThreadPool", names, to_size, &num_threads, to_size,
                                     &queue_depth_max))
        return NULL;
    if (num_threads < 1 || num_threads > THREADS_MAX || queue_depth_max < 1 || queue_depth_max > QUEUE_DEPTH_MAX) {
        value_error("num_threads must be 1 to 1024 and queue_depth_max 1 to 1048576");
        return NULL;
    }
    struct pool *pool = pool_new(num_threads, queue_depth_max);
    if (!pool)
        return PyErr_SetFromErrno(PyExc_OSError);
    PoolObject *self = PyObject_New(PoolObject, type);
    if (self)
        self->pool = pool;
    else
        pool_free(pool);
    return (PyObject *)self;
}

/* Takes over the batch: queues it, GIL free, and returns its Python object. */
static PyObject *pool_object_submit(PyObject *self, struct batch *batch)
{
    if (!batch)
        return PyErr_NoMemory();
    struct module_state *state = PyType_GetModuleState(Py_TYPE(self));
    BatchObject *object = PyObject_New(BatchObject, state->batch_type);
    if (!object) {
        batch_release(batch);
        return NULL;
    }
    object->batch = batch;
    int code;
    Py_BEGIN_ALLOW_THREADS
    code = pool_submit(((PoolObject *)self)->pool, batch);
    Py_END_ALLOW_THREADS
    if (!code)
        return (PyObject *)object;
    PyErr_SetString(PyExc_RuntimeError, code == EPIPE ? "the thread pool is closed"
                                                      : "the thread pool belongs to the process before the fork");
    Py_DECREF(object);
    return NULL;
}

static PyObject *pool_object_submit_io(PyObject *self, PyObject *args, PyObject *kwargs)
{
    int write;
    PyObject *sequence;
    size_t checksums, granule_bytes, request_bytes, num_segments;
    static char *names[] = {"write", "segments", "checksums", "granule_bytes", "request_bytes", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "pOO&O&O&:submit_io", names, &write, &sequence, to_size, &checksums,
                                     to_size, &granule_bytes, to_size, &request_bytes))
        return NULL;
    struct io_segment *segments = parse_segments(sequence, sizeof *segments, parse_io_segment, &num_segments);
    if (!segments)
        return NULL;
    PyObject *object = NULL;
    if (check_io(segments, num_segments, checksums, granule_bytes, request_bytes))
        object = pool_object_submit(self, io_batch(write, segments, num_segments, (uint32_t *)checksums, granule_bytes,
                                                   request_bytes));
    free(segments);
    return object;
}

static bool check_gather(size_t address, size_t num_bytes, const struct io_segment *parts, size_t num_parts,
                         size_t checksums, size_t granule_bytes)
{
    if (!num_parts || !checksums || !granule_bytes)
        return value_error("a gather needs a part, checksums and a positive granule_bytes");
    size_t done = address;
    for (size_t i = 0; i < num_parts; i++) {
        size_t start = (size_t)parts[i].address;
        if (start < done || !parts[i].num_bytes || start + parts[i].num_bytes > address + num_bytes)
            return value_error("parts must lie in the memory, in order and apart");
        done = start + parts[i].num_bytes;
    }
    return aligned(checksums, sizeof(uint32_t));
}

static PyObject *pool_object_submit_gather(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *sequence;
    size_t address, num_bytes, checksums, granule_bytes, request_bytes, num_parts;
    static char *names[] = {"address", "num_bytes", "parts", "checksums", "granule_bytes", "request_bytes", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&OO&O&O&:submit_gather", names, to_size, &address, to_size,
                                     &num_bytes, &sequence, to_size, &checksums, to_size, &granule_bytes, to_size,
                                     &request_bytes))
        return NULL;
    struct io_segment *parts = parse_segments(sequence, sizeof *parts, parse_io_segment, &num_parts);
    if (!parts)
        return NULL;
    PyObject *object = NULL;
    if (check_gather(address, num_bytes, parts, num_parts, checksums, granule_bytes))
        object = pool_object_submit(self, gather_batch((unsigned char *)address, num_bytes, parts, num_parts,
                                                       (uint32_t *)checksums, granule_bytes, request_bytes));
    free(parts);
    return object;
}

/* What four addresses name, or false with an exception. */
static bool check_planes(const size_t addresses[4], bool is_split, size_t moment_bytes,
                         struct adamw_planes *planes)
{
    if (is_split ? !addresses[1] : addresses[1] != 0)
        return value_error("remainder must be the address of a plane when split, else 0");
    if (!addresses[3] && moment_bytes < sizeof(float))
        return value_error("without exp_avg_sq, exp_avg must be fp32");
    *planes = (struct adamw_planes){(void *)addresses[0], (int16_t *)addresses[1], (void *)addresses[2],
                                    (void *)addresses[3]};
    return aligned(addresses[0], is_split ? sizeof(uint16_t) : sizeof(float)) &&
           aligned(addresses[1], sizeof(int16_t)) &&
           aligned(addresses[2] | addresses[3], moment_bytes);
}

/* None: moments are fp32. Else three numbers: the bytes of a moment, the key, and the number of the first element. */
static bool parse_rounding(PyObject *tuple, struct adamw_rounding *rounding)
{
    *rounding = (struct adamw_rounding){.moment_bytes = sizeof(float)};
    if (tuple == Py_None)
        return true;
    unsigned long long key;
    size_t first;
    if (!PyTuple_Check(tuple)) {
        PyErr_SetString(PyExc_TypeError, "rounding must be a tuple or None");
        return false;
    }
    if (!PyArg_ParseTuple(tuple, "O&KO&:rounding", to_size, &rounding->moment_bytes, &key, to_size, &first))
        return false;
    if (rounding->moment_bytes != 1 && rounding->moment_bytes != 2)
        return value_error("moments that are rounded have 1 or 2 bytes");
    rounding->key_low = (uint32_t)key;
    rounding->key_high = (uint32_t)(key >> 32);
    rounding->first = (uint32_t)first;
    return true;
}

static PyObject *pool_object_submit_adamw(PyObject *self, PyObject *args, PyObject *kwargs)
{
    int is_split;
    PyObject *sequence, *rounding = Py_None;
    size_t after[4], before[4] = {SIZE_MAX}, grad, num_segments; /* no address is SIZE_MAX: in place */
    struct adamw_scalars s;
    struct adamw_work work;
    static char *names[] = {"planes", "split", "segments", "scalars", "before", "rounding", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "(O&O&O&O&O&)pO(ffffffff)|(O&O&O&O&)O:submit_adamw", names, to_size,
                                     &after[0], to_size, &after[1], to_size, &after[2], to_size, &after[3], to_size,
                                     &grad, &is_split, &sequence, &s.beta1, &s.one_minus_beta1, &s.beta2,
                                     &s.one_minus_beta2, &s.eps, &s.step_size, &s.sqrt_bias2, &s.grad_scale, to_size,
                                     &before[0], to_size, &before[1], to_size, &before[2], to_size, &before[3],
                                     &rounding))
        return NULL;
    if (!parse_rounding(rounding, &work.rounding))
        return NULL;
    size_t moment_bytes = work.rounding.moment_bytes;
    if (!check_planes(after, is_split, moment_bytes, &work.after) ||
        !check_planes(before[0] == SIZE_MAX ? after : before, is_split, moment_bytes, &work.before) ||
        !aligned(grad, is_split ? sizeof(uint16_t) : sizeof(float)))
        return NULL;
    if (!work.before.exp_avg_sq != !work.after.exp_avg_sq) {
        value_error("exp_avg_sq must be 0 before and after, or neither");
        return NULL;
    }
    work.grad = (const void *)grad;
    struct adamw_segment *segments = parse_segments(sequence, sizeof *segments, parse_adamw_segment, &num_segments);
    if (!segments)
        return NULL;
    size_t num_threads = pool_num_threads(((PoolObject *)self)->pool);
    PyObject *object = pool_object_submit(self, adamw_batch(&work, segments, num_segments, &s, num_threads));
    free(segments);
    return object;
}

static PyObject *pool_object_submit_copy(PyObject *self, PyObject *args, PyObject *kwargs)
{
    size_t target, source, num_bytes, request_bytes;
    static char *names[] = {"target", "source", "num_bytes", "request_bytes", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&O&:submit_copy", names, to_size, &target, to_size, &source,
                                     to_size, &num_bytes, to_size, &request_bytes))
        return NULL;
    if (!num_bytes || !request_bytes) {
        value_error("num_bytes and request_bytes must be positive");
        return NULL;
    }
    return pool_object_submit(self, copy_batch((void *)target, (const void *)source, num_bytes, request_bytes));
}

static PyObject *pool_object_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    Py_BEGIN_ALLOW_THREADS
    pool_close(((PoolObject *)self)->pool);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static void pool_object_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    Py_BEGIN_ALLOW_THREADS
    pool_free(((PoolObject *)self)->pool);
    Py_END_ALLOW_THREADS
    PyObject_Free(self);
    Py_DECREF(type);
}

static PyMethodDef pool_methods[] = {
    {"submit_io", (PyCFunction)(void (*)(void))pool_object_submit_io, METH_VARARGS | METH_KEYWORDS,
     "submit_io($self, write, segments, checksums, granule_bytes, request_bytes)\n--\n\n"
     "Read or write segments of (fd, file_offset, address, num_bytes)."},
    {"submit_gather", (PyCFunction)(void (*)(void))pool_object_submit_gather, METH_VARARGS | METH_KEYWORDS,
     "submit_gather($self, address, num_bytes, parts, checksums, granule_bytes, request_bytes)\n--\n\n"
     "Put memory together from parts (fd, file_offset, address, num_bytes), with zeros between them."},
    {"submit_adamw", (PyCFunction)(void (*)(void))pool_object_submit_adamw, METH_VARARGS | METH_KEYWORDS,
     "submit_adamw($self, planes, split, segments, scalars, before=..., rounding=None)\n--\n\n"
     "AdamW over planes (weight, remainder, exp_avg, exp_avg_sq, grad); Lion if exp_avg_sq is 0."},
    {"submit_copy", (PyCFunction)(void (*)(void))pool_object_submit_copy, METH_VARARGS | METH_KEYWORDS,
     "submit_copy($self, target, source, num_bytes, request_bytes)\n--\n\n"
     "Copy bytes that do not overlap, in requests of at most request_bytes."},
    {"close", pool_object_close, METH_NOARGS,
     "close($self)\n--\n\nFinish what was submitted, then join the threads."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot pool_slots[] = {
    {Py_tp_doc, "ThreadPool(num_threads, queue_depth_max)\n--\n\n"
                "num_threads native threads over one bounded first-in first-out queue."},
    {Py_tp_new, pool_object_new},
    {Py_tp_methods, pool_methods},
    {Py_tp_dealloc, pool_object_dealloc},
    {0, NULL},
};
static PyType_Spec pool_spec = {
    .name = "megatier._native.ThreadPool",
    .basicsize = sizeof(PoolObject),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = pool_slots,
};

/* ---- functions ---- */

static PyObject *module_copy(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    size_t target, source, num_bytes;
    static char *names[] = {"target", "source", "num_bytes", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&:copy", names, to_size, &target, to_size, &source, to_size,
                                     &num_bytes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    copy((void *)target, (const void *)source, num_bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *module_fill(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    size_t target, num_bytes;
    int byte;
    static char *names[] = {"target", "byte", "num_bytes", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&iO&:fill", names, to_size, &target, &byte, to_size, &num_bytes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    fill((void *)target, byte, num_bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* A checksum of bytes, by the name that its error messages say. */
static PyObject *checksum_of(PyObject *args, PyObject *kwargs, const char *format,
                             uint32_t (*of)(const void *bytes, size_t num_bytes))
{
    size_t address, num_bytes;
    static char *names[] = {"address", "num_bytes", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, to_size, &address, to_size, &num_bytes))
        return NULL;
    uint32_t found;
    Py_BEGIN_ALLOW_THREADS
    found = of((const void *)address, num_bytes);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLong(found);
}

static PyObject *module_checksum(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    return checksum_of(args, kwargs, "O&O&:checksum", checksum);
}

static PyObject *module_crc32c(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    return checksum_of(args, kwargs, "O&O&:crc32c", crc32c);
}

static PyObject *module_split(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    size_t master, weight, remainder, num_elements;
    static char *names[] = {"master", "weight", "remainder", "num_elements", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&O&:split", names, to_size, &master, to_size, &weight, to_size,
                                     &remainder, to_size, &num_elements))
        return NULL;
    if (!aligned(master, sizeof(float)) || !aligned(weight | remainder, sizeof(uint16_t)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    split((const float *)master, (uint16_t *)weight, (int16_t *)remainder, num_elements);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *module_join(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    size_t weight, remainder, master, num_elements;
    static char *names[] = {"weight", "remainder", "master", "num_elements", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&O&:join", names, to_size, &weight, to_size, &remainder,
                                     to_size, &master, to_size, &num_elements))
        return NULL;
    if (!aligned(master, sizeof(float)) || !aligned(weight | remainder, sizeof(uint16_t)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    join((const uint16_t *)weight, (const int16_t *)remainder, (float *)master, num_elements);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *module_round_bf16(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    size_t source, target, num_elements;
    static char *names[] = {"source", "target", "num_elements", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&:round_bf16", names, to_size, &source, to_size, &target,
                                     to_size, &num_elements))
        return NULL;
    if (!aligned(source, sizeof(float)) || !aligned(target, sizeof(uint16_t)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    round_bf16((const float *)source, (uint16_t *)target, num_elements);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *module_accumulate(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    size_t accumulator, source, num_elements;
    int first;
    static char *names[] = {"accumulator", "source", "num_elements", "first", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&p:accumulate", names, to_size, &accumulator, to_size, &source,
                                     to_size, &num_elements, &first))
        return NULL;
    if (!aligned(accumulator | source, sizeof(float)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (first)
        copy((void *)accumulator, (const void *)source, num_elements * sizeof(float));
    else
        accumulate((float *)accumulator, (const float *)source, num_elements);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *module_sum_squares(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    size_t address, num_elements, partials;
    int is_bf16;
    static char *names[] = {"address", "num_elements", "is_bf16", "partials", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&pO&:sum_squares", names, to_size, &address, to_size,
                                     &num_elements, &is_bf16, to_size, &partials))
        return NULL;
    if (!aligned(address, is_bf16 ? sizeof(uint16_t) : sizeof(float)) || !aligned(partials, sizeof(double)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (is_bf16)
        sum_squares_bf16((const uint16_t *)address, num_elements, (double *)partials);
    else
        sum_squares_fp32((const float *)address, num_elements, (double *)partials);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *module_sum_exactly(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    size_t address, num_elements;
    static char *names[] = {"address", "num_elements", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:sum_exactly", names, to_size, &address, to_size,
                                     &num_elements))
        return NULL;
    if (!aligned(address, sizeof(double)))
        return NULL;
    double sum;
    Py_BEGIN_ALLOW_THREADS
    sum = sum_exactly((const double *)address, num_elements);
    Py_END_ALLOW_THREADS
    return PyFloat_FromDouble(sum);
}

/* ---- instruction set levels ---- */

static const char *const isa_names[] = {
    [ISA_PORTABLE] = "portable",
#if defined(__x86_64__)
    [ISA_AVX2] = "avx2",
    [ISA_AVX512] = "avx512",
#elif defined(__aarch64__)
    [ISA_CRC32] = "crc32",
#endif
};

static enum isa_level isa_best(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return ISA_AVX512;
    if (__builtin_cpu_supports("avx2"))
        return ISA_AVX2;
#elif defined(__aarch64__)
    if (getauxval(AT_HWCAP) & HWCAP_CRC32)
        return ISA_CRC32;
#endif
    return ISA_PORTABLE;
}

static PyObject *module_isa_levels(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *levels = PyList_New(0);
    for (int level = isa_best(); levels && level >= ISA_PORTABLE; level--) {
        PyObject *name = PyUnicode_FromString(isa_names[level]);
        if (!name || PyList_Append(levels, name))
            Py_CLEAR(levels);
        Py_XDECREF(name);
    }
    return levels;
}

static PyObject *module_set_isa(PyObject *module, PyObject *args, PyObject *kwargs)
{
    (void)module;
    const char *name;
    static char *names[] = {"level", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:set_isa", names, &name))
        return NULL;
    for (int level = isa_best(); level >= ISA_PORTABLE; level--)
        if (!strcmp(name, isa_names[level])) {
            isa_level = level;
            Py_RETURN_NONE;
        }
    return PyErr_Format(PyExc_ValueError, "this CPU does not support the level '%s'", name);
}

/* ---- module ---- */

#define FUNCTION(name, signature, doc)                                                                 \
    {#name, (PyCFunction)(void (*)(void))module_##name, METH_VARARGS | METH_KEYWORDS,                  \
     #name "($module, " signature ")\n--\n\n" doc}

static PyMethodDef module_methods[] = {
    FUNCTION(copy, "target, source, num_bytes", "Copy bytes that do not overlap."),
    FUNCTION(fill, "target, byte, num_bytes", "Set every byte."),
    FUNCTION(checksum, "address, num_bytes", "CRC32C in four lanes."),
    FUNCTION(crc32c, "address, num_bytes", "Plain CRC32C."),
    FUNCTION(split, "master, weight, remainder, num_elements", "fp32 -> bf16 and the int16 that is missing."),
    FUNCTION(join, "weight, remainder, master, num_elements", "The exact fp32 of split."),
    FUNCTION(round_bf16, "source, target, num_elements", "fp32 -> bf16, nearest even; target may be source."),
    FUNCTION(accumulate, "accumulator, source, num_elements, first", "fp32 sum; first: copy."),
    FUNCTION(sum_squares, "address, num_elements, is_bf16, partials", "fp64 sums of squares in a fixed order."),
    FUNCTION(sum_exactly, "address, num_elements", "Sum of fp64 numbers, rounded once."),
    FUNCTION(set_isa, "level", "Use this instruction set level from now on."),
    {"isa_levels", module_isa_levels, METH_NOARGS,
     "isa_levels($module)\n--\n\nLevels this CPU can run, best first."},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    struct module_state *state = PyModule_GetState(module);
    isa_level = isa_best();
    state->batch_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &batch_spec, NULL);
    if (!state->batch_type || PyModule_AddType(module, state->batch_type))
        return -1;
    state->latch_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &latch_spec, NULL);
    if (!state->latch_type || PyModule_AddType(module, state->latch_type))
        return -1;
    state->pool_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &pool_spec, NULL);
    if (!state->pool_type || PyModule_AddType(module, state->pool_type))
        return -1;
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct module_state *state = PyModule_GetState(module);
    Py_VISIT(state->batch_type);
    Py_VISIT(state->latch_type);
    Py_VISIT(state->pool_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    struct module_state *state = PyModule_GetState(module);
    Py_CLEAR(state->batch_type);
    Py_CLEAR(state->latch_type);
    Py_CLEAR(state->pool_type);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, module_exec}, {0, NULL}};
static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "megatier._native",
    .m_doc = "The native core: thread pool, block I/O, checksums, AdamW.",
    .m_size = sizeof(struct module_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module_definition); }
