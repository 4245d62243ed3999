#define _GNU_SOURCE /* O_DIRECT */
#define _FILE_OFFSET_BITS 64

#include "block_io.h"

#include "checksum.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#define DIRECT_BYTES 4096 /* what O_DIRECT asks of offset, address and length */

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

/* Moves the whole extent or says why not. A transfer that gets no further than the one before it is "short": the file
 * or the device ends there. */
static bool transfer(const struct io_request *request, struct failure *failure)
{
    const struct io_segment *extent = &request->extent;
    size_t start = 0, reached = 0;
    while (reached < extent->num_bytes) {
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
        start = reached < extent->num_bytes ? resume_point(extent->fd, reached) : reached;
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
    return transfer(request, failure) && (!request->checksums || check_granules(request, failure));
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
