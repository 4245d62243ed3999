#include "copy.h"

#include <string.h>

#include "thread_pool.h"

struct copy_request {
    char *target;
    const char *source;
    size_t num_bytes;
};

static bool copy_run(const void *opaque, struct failure *failure)
{
    (void)failure;
    const struct copy_request *request = opaque;
    memcpy(request->target, request->source, request->num_bytes);
    return true;
}

struct batch *copy_batch(void *target, const void *source, size_t num_bytes, size_t request_bytes)
{
    size_t num_requests = num_bytes / request_bytes + (num_bytes % request_bytes != 0);
    struct batch *batch = batch_new(num_requests, sizeof(struct copy_request), copy_run);
    for (size_t i = 0; batch && i < num_requests; i++) {
        size_t start = i * request_bytes, left = num_bytes - start;
        *(struct copy_request *)batch_request(batch, i) = (struct copy_request){
            .target = (char *)target + start,
            .source = (const char *)source + start,
            .num_bytes = left < request_bytes ? left : request_bytes,
        };
    }
    return batch;
}
