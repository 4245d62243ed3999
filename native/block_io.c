#define _GNU_SOURCE /* O_DIRECT */
#define _FILE_OFFSET_BITS 64

#include "block_io.h"

#include "checksum.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define DIRECT_BYTES 4096 /* what O_DIRECT asks of offset, address and length */
#define HUGE_PAGE_BYTES ((size_t)2 << 20)

struct io_request {
    struct io_segment extent; /* this request's part of the segment */
    size_t segment;
    uint32_t *checksums; /* of this request's first granule, or NULL */
    size_t granule_bytes;
    bool write;
};

static bool io_failed(const struct io_request *request, struct failure *failure, const char *what, int code,
                      size_t found)
{
    *failure = (struct failure){what, code, request->segment, request->extent.file_offset + (int64_t)found,
                                request->extent.num_bytes, found};
    return false;
}

/* Where to go on after a short transfer that reached `moved`: O_DIRECT starts at multiples of 4,096 only, so the odd
 * end moves once more. */
static size_t resume_point(int fd, size_t moved)
{
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && flags & O_DIRECT ? moved / DIRECT_BYTES * DIRECT_BYTES : moved;
}

/* Moves the first `enough` bytes of the extent, and as many of the others as come along, or says why not. A transfer
 * that gets no further than the one before it is "short": the file or the device ends there. */
static bool transfer(const struct io_request *request, size_t enough, struct failure *failure)
{
    const struct io_segment *extent = &request->extent;
    size_t start = 0, reached = 0;
    while (reached < enough) {
        unsigned char *address = extent->address + start;
        size_t left = extent->num_bytes - start;
        off_t offset = extent->file_offset + (off_t)start;
        ssize_t moved = request->write ? pwrite(extent->fd, address, left, offset)
                                       : pread(extent->fd, address, left, offset);
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            return io_failed(request, failure, "io", errno, reached);
        if (start + (size_t)moved <= reached)
            return io_failed(request, failure, "short", 0, reached);
        reached = start + (size_t)moved;
        start = reached < enough ? resume_point(extent->fd, reached) : reached;
    }
    return true;
}

/* A write stores the checksum of each granule, a read compares. */
static bool check_granules(const struct io_request *request, struct failure *failure)
{
    const struct io_segment *extent = &request->extent;
    for (size_t start = 0, granule = 0; start < extent->num_bytes; start += request->granule_bytes, granule++) {
        size_t left = extent->num_bytes - start;
        size_t size = left < request->granule_bytes ? left : request->granule_bytes;
        uint32_t found = checksum(extent->address + start, size);
        if (request->write)
            request->checksums[granule] = found;
        else if (request->checksums[granule] != found) {
            *failure = (struct failure){"checksum", 0, request->segment, extent->file_offset + (int64_t)start,
                                        request->checksums[granule], found};
            return false;
        }
    }
    return true;
}

static bool io_run(const void *record, struct failure *failure)
{
    const struct io_request *request = record;
    return transfer(request, request->extent.num_bytes, failure) &&
           (!request->checksums || check_granules(request, failure));
}

struct batch *io_batch(bool write, const struct io_segment *segments, size_t num_segments, uint32_t *checksums,
                       size_t granule_bytes, size_t request_bytes)
{
    size_t most = request_bytes, num_requests = 0, index = 0;
    if (checksums)
        most = request_bytes > granule_bytes ? request_bytes / granule_bytes * granule_bytes : granule_bytes;
    for (size_t i = 0; i < num_segments; i++)
        num_requests += segments[i].num_bytes / most + (segments[i].num_bytes % most != 0);
    struct batch *batch = batch_new(num_requests, sizeof(struct io_request), io_run);
    for (size_t i = 0; batch && i < num_segments; i++) {
        const struct io_segment *segment = &segments[i];
        for (size_t start = 0; start < segment->num_bytes; start += most) {
            size_t left = segment->num_bytes - start;
            *(struct io_request *)batch_request(batch, index++) = (struct io_request){
                .extent = {segment->fd, segment->file_offset + (int64_t)start, segment->address + start,
                           left < most ? left : most},
                .segment = i,
                .checksums = checksums ? checksums + start / granule_bytes : NULL,
                .granule_bytes = granule_bytes,
                .write = write,
            };
        }
        if (checksums)
            checksums += segment->num_bytes / granule_bytes;
    }
    return batch;
}

/* ---- gathers ---- */

/* Memory [address, address + num_bytes) that is put together from parts of files. */
struct gather_request {
    unsigned char *address;
    size_t num_bytes;
    uint32_t *checksums; /* of the first granule */
    size_t granule_bytes;
    const struct io_segment *parts; /* all parts of the batch, in the order of their addresses */
    size_t num_parts;
};

static size_t round_up(size_t num_bytes, size_t unit) { return (num_bytes + unit - 1) / unit * unit; }

/* A thread's window stays until the thread ends, since the kernel takes longer to give and to pin fresh memory for each
 * request than to read into it. Huge pages are pinned at once, and make few segments of a command. */
static pthread_key_t window_key;
static int window_key_error;
static _Thread_local size_t window_bytes;

static __attribute__((constructor)) void window_key_make(void)
{
    window_key_error = pthread_key_create(&window_key, free);
}

/* The calling thread's window, with at least so many bytes. NULL: no memory. */
static unsigned char *window_of(size_t num_bytes)
{
    if (window_key_error)
        return NULL;
    unsigned char *window = pthread_getspecific(window_key);
    if (num_bytes <= window_bytes)
        return window;
    size_t larger_bytes = round_up(num_bytes, HUGE_PAGE_BYTES);
    unsigned char *larger = aligned_alloc(HUGE_PAGE_BYTES, larger_bytes);
    if (!larger || pthread_setspecific(window_key, larger)) {
        free(larger);
        return NULL;
    }
    madvise(larger, larger_bytes, MADV_HUGEPAGE);
    free(window);
    window_bytes = larger_bytes;
    return larger;
}

/* Reads the bytes of a part that belong to memory [start, stop). A part begins at any byte of its file and O_DIRECT at
 * multiples of 4,096 only, so the window around them is read, and copied from. */
static bool read_part(const struct gather_request *request, size_t index, unsigned char *window,
                      struct failure *failure)
{
    const struct io_segment *part = &request->parts[index];
    unsigned char *start = part->address > request->address ? part->address : request->address;
    unsigned char *stop = part->address + part->num_bytes, *end = request->address + request->num_bytes;
    size_t num_bytes = (size_t)((stop < end ? stop : end) - start);
    int64_t offset = part->file_offset + (start - part->address);
    size_t before = (size_t)(offset % DIRECT_BYTES);
    const struct io_request whole = {
        .extent = {part->fd, offset - (int64_t)before, window, round_up(before + num_bytes, DIRECT_BYTES)},
        .segment = index,
    };
    if (!transfer(&whole, before + num_bytes, failure)) /* the file may end inside the last page */
        return false;
    memcpy(start, window + before, num_bytes);
    return true;
}

/* Verifies what was put together. A damaged granule is named by the first part of a file that it has bytes of. */
static bool check_gathered(const struct gather_request *request, struct failure *failure)
{
    const struct io_request whole = {
        .extent = {-1, 0, request->address, request->num_bytes},
        .checksums = request->checksums,
        .granule_bytes = request->granule_bytes,
    };
    if (check_granules(&whole, failure))
        return true;
    const unsigned char *granule = request->address + failure->file_offset;
    const struct io_segment *part = request->parts;
    size_t index = 0;
    while (index + 1 < request->num_parts && part[index].address + part[index].num_bytes <= granule)
        index++;
    failure->segment = index;
    failure->file_offset = part[index].file_offset + (granule > part[index].address ? granule - part[index].address : 0);
    return false;
}

static bool gather_run(const void *record, struct failure *failure)
{
    const struct gather_request *request = record;
    unsigned char *done = request->address, *end = done + request->num_bytes;
    unsigned char *window = window_of(request->num_bytes + 2 * DIRECT_BYTES);
    if (!window)
        return io_failed(&(struct io_request){.extent = request->parts[0]}, failure, "io", ENOMEM, 0);
    bool ok = true;
    for (size_t i = 0; ok && i < request->num_parts && request->parts[i].address < end; i++) {
        const struct io_segment *part = &request->parts[i];
        if (part->address + part->num_bytes <= done)
            continue;
        if (part->address > done)
            memset(done, 0, (size_t)(part->address - done)); /* padding is in no file */
        ok = read_part(request, i, window, failure);
        done = part->address + part->num_bytes;
    }
    if (ok && done < end)
        memset(done, 0, (size_t)(end - done));
    return ok && check_gathered(request, failure);
}

struct batch *gather_batch(unsigned char *address, size_t num_bytes, const struct io_segment *parts, size_t num_parts,
                           uint32_t *checksums, size_t granule_bytes, size_t request_bytes)
{
    size_t most = request_bytes > granule_bytes ? request_bytes / granule_bytes * granule_bytes : granule_bytes;
    size_t num_requests = num_bytes / most + (num_bytes % most != 0);
    struct batch *batch = batch_new_sharing(num_requests, sizeof(struct gather_request), num_parts * sizeof *parts,
                                            gather_run);
    if (!batch)
        return NULL;
    struct io_segment *shared = batch_shared(batch);
    memcpy(shared, parts, num_parts * sizeof *parts);
    for (size_t i = 0; i < num_requests; i++) {
        size_t start = i * most, left = num_bytes - start;
        *(struct gather_request *)batch_request(batch, i) = (struct gather_request){
            .address = address + start,
            .num_bytes = left < most ? left : most,
            .checksums = checksums + start / granule_bytes,
            .granule_bytes = granule_bytes,
            .parts = shared,
            .num_parts = num_parts,
        };
    }
    return batch;
}
