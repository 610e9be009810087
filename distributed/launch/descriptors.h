// What a process of the launcher does to all its descriptors.
#pragma once

namespace lockstep::dist {

/// Opens /dev/null at 0, 1 and 2 where they are closed: the next pipe would get that number, and
/// output would go into it. Throws IoError.
void fill_standard_descriptors();

/// Closes all descriptors from `first` on. Also where the kernel has no close_range, or a filter
/// refuses it.
void close_descriptors(int first);
/// Marks them close-on-exec instead.
void close_descriptors_on_exec(int first);

}  // namespace lockstep::dist
